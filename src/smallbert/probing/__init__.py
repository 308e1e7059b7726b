"""Probing: where a frozen model keeps what a task asks for."""
