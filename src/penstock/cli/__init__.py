"""The command line ``penstock``. Each command has one module."""
