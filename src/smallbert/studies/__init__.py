"""Studies: recipes x seeds x tasks, each run made once and none dropped."""
