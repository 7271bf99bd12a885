"""The command line: parse, call one function, render one value. The only place with a broad ``except``."""
