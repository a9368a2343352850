"""Questions about a network that is not of this repository: its memory, its speed, and what a script does wrong."""
