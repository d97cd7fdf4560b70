"""The grammar of the command line: every command with its arguments, and the parser."""
