"""What every measurement needs: turns, statistics, records, ranks, nodes."""
