"""Texts: as token numbers with their labels, in batches, read from a corpus, made out of others."""
