"""The recipe language: what a recipe says, how its text is read, which settings and names there are."""
