"""What a user writes: components, streams, groupings and the builder. Inert data; nothing here runs."""
