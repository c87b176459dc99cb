"""The control plane: slots connect to the coordinator on the driver, prove they belong, report and obey."""
