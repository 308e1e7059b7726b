"""Searching settings: what to draw from, one trial, the search, and what is kept of it."""
