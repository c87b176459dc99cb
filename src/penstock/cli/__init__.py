"""The command line: ``penstock run | plan | dlq | bench | prepare``. One module per command."""
