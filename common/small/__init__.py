"""Every abstraction of the ladder on one to four pages of code, to be read; the whole ones are there to be used."""
