"""Every abstraction of the ladder on one to three pages of code, to be read; the whole ones are there to be used."""
