"""Questions about a network that is not of this repository: its memory, its speed here, and its speed on many GPUs."""
