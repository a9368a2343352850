"""Reports of results: tables, verdicts, plots, the numbers in the READMEs."""
