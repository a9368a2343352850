"""Reports of results: tables, verdicts, plots, the numbers in the READMEs.

They read the records of `benchmarks.harness.records`, and results.json, the Report of `benchmarks.compare`.
"""
