"""Reports of results: tables, verdicts, plots, the page, the numbers in the READMEs."""
