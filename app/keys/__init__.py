"""Key bindings: their tables, their choice for the footer and the help, the command palette."""
