"""Hidden states of many texts on disk: built once, read many times."""
