"""The control plane: workers connect to the coordinator on the driver, prove they belong, report and obey."""
