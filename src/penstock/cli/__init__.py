"""The command line: ``penstock run | plan | bench``. One module per command."""
