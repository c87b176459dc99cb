"""Kafka: a spout that reads topics, a bolt and a sink that write them. Needs ``pip install "penstock[kafka]"``."""

from penstock.connectors.kafka_bolt import KafkaBolt
from penstock.connectors.kafka_sink import KafkaSink
from penstock.connectors.kafka_spout import KafkaSpout

__all__ = ["KafkaBolt", "KafkaSink", "KafkaSpout"]
