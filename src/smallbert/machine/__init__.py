"""The machine: files that are never half written, and processes that share its cores, memory and GPU."""
