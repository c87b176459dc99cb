"""The ends of a stream in other systems: Kafka, files, sockets, PostgreSQL."""
