"""Parts of every measurement: turns, statistics, records, ranks, nodes."""
