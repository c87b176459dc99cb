package peers;

import java.io.BufferedWriter;
import java.io.FileWriter;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.storm.kafka.spout.FirstPollOffsetStrategy;
import org.apache.storm.kafka.spout.KafkaSpout;
import org.apache.storm.kafka.spout.KafkaSpoutConfig;
import org.apache.storm.task.OutputCollector;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.topology.OutputFieldsDeclarer;
import org.apache.storm.topology.TopologyBuilder;
import org.apache.storm.topology.base.BaseRichBolt;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Tuple;
import org.apache.storm.tuple.Values;

/**
 * Word count of lines from Kafka, acked: spout 1, split 2, count 4, persist 1. A line is 16 digits, the microseconds
 * since 1970 when it was sent, a tab, and words with one space between. One JSON line on stdout.
 */
public final class KafkaWordCount {
    // Options and measurements are static: LocalCluster runs every task in this JVM.
    static boolean sent; // latency is measured from when a line was sent, not from the spout's emit
    static final long SLICE_NANOS = 4_000_000;
    static long wordNanos; // for which persist waits after each word, as for a call to another system
    static volatile boolean measuring; // latencies are recorded only while this is set
    static final Queue<Counter> WORDS = new ConcurrentLinkedQueue<>(); // persisted
    static final Queue<Counter> LINES = new ConcurrentLinkedQueue<>(); // fully acked
    static final Queue<Counter> FAILED = new ConcurrentLinkedQueue<>();
    static final Queue<Histogram> LATENCY = new ConcurrentLinkedQueue<>();

    private static long micros() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
    }

    /** Storm's own spout, which also counts acks and fails. */
    static final class LineSpout extends KafkaSpout<String, String> {
        private transient Counter acked;
        private transient Counter failed;

        LineSpout(KafkaSpoutConfig<String, String> config) {
            super(config);
        }

        @Override
        public void activate() {
            acked = acked == null ? Peer.register(LINES, new Counter()) : acked;
            failed = failed == null ? Peer.register(FAILED, new Counter()) : failed;
            super.activate();
        }

        @Override
        public void ack(Object id) {
            acked.increment();
            super.ack(id);
        }

        @Override
        public void fail(Object id) {
            failed.increment();
            super.fail(id);
        }
    }

    /** Splits on spaces; each word carries the time from which its latency is measured. */
    static final class SplitBolt extends BaseRichBolt {
        private transient OutputCollector out;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            out = collector;
        }

        @Override
        public void execute(Tuple tuple) {
            String line = tuple.getString(0);
            Long since = sent ? Long.valueOf(line.substring(0, 16)) : tuple.getLong(1);
            for (int from = 17, to; from < line.length(); from = to + 1) {
                int space = line.indexOf(' ', from);
                to = space < 0 ? line.length() : space;
                out.emit(tuple, new Values(line.substring(from, to), since));
            }
            out.ack(tuple);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(new Fields("word", "since"));
        }
    }

    /** Counts words in a HashMap and emits each new count. */
    static final class CountBolt extends BaseRichBolt {
        private transient OutputCollector out;
        private transient HashMap<String, Long> counts;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            out = collector;
            counts = new HashMap<>();
        }

        @Override
        public void execute(Tuple tuple) {
            String word = tuple.getString(0);
            Long count = counts.merge(word, 1L, Long::sum);
            out.emit(tuple, new Values(word, count, tuple.getValue(1)));
            out.ack(tuple);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(new Fields("word", "count", "since"));
        }
    }

    /** Writes each count to a file, as a line in a buffer of 64 KB. */
    static final class PersistBolt extends BaseRichBolt {
        private final String path;
        private transient OutputCollector out;
        private transient BufferedWriter file;
        private transient Counter words;
        private transient Histogram latency;
        private long owed; // nanoseconds of waiting, saved up because short waits are inexact

        PersistBolt(String path) {
            this.path = path;
        }

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            out = collector;
            words = Peer.register(WORDS, new Counter());
            latency = Peer.register(LATENCY, new Histogram());
            try {
                file = new BufferedWriter(new FileWriter(path, StandardCharsets.UTF_8), 65_536);
            } catch (IOException e) {
                throw new UncheckedIOException(e);
            }
        }

        @Override
        public void execute(Tuple tuple) {
            try {
                file.write(tuple.getString(0));
                file.write(' ');
                file.write(tuple.getLong(1).toString());
                file.write('\n');
            } catch (IOException e) {
                throw new UncheckedIOException(e);
            }
            owed += wordNanos;
            while (owed > SLICE_NANOS) {
                long begun = System.nanoTime();
                LockSupport.parkNanos(owed);
                owed -= System.nanoTime() - begun;
            }
            words.increment();
            if (measuring) {
                latency.record((micros() - tuple.getLong(2)) * 1000);
            }
            out.ack(tuple);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
        }
    }

    public static void main(String[] args) throws Exception {
        Map<String, String> defaults = new HashMap<>(Map.of("bootstrap", "", "topic", "lines", "start", "earliest", "since", "sent",
                "out", "/dev/null", "until", "0", "max-pending", "5000", "warmup", "10", "seconds", "10", "tuned",
                "true"));
        defaults.put("word-us", "0");
        Peer peer = new Peer(args, defaults);
        wordNanos = peer.number("word-us") * 1_000L;
        sent = peer.text("since").equals("sent");
        long until = peer.number("until") > 0 ? peer.number("until") : Long.MAX_VALUE; // words in all, then the end

        KafkaSpoutConfig.Builder<String, String> spout = KafkaSpoutConfig
                .builder(peer.text("bootstrap"), peer.text("topic"))
                .setProp(ConsumerConfig.GROUP_ID_CONFIG, "storm-" + ProcessHandle.current().pid()) // of this run alone
                .setProcessingGuarantee(KafkaSpoutConfig.ProcessingGuarantee.AT_LEAST_ONCE)
                .setFirstPollOffsetStrategy(FirstPollOffsetStrategy.valueOf(peer.text("start").toUpperCase(Locale.ROOT)))
                .setRecordTranslator(record -> new Values(record.value(), micros()), new Fields("line", "read"));
        if (peer.flag("tuned")) {
            spout.setProp(ConsumerConfig.MAX_POLL_RECORDS_CONFIG, 5000).setPollTimeoutMs(1); // acks never wait for poll
        }
        TopologyBuilder builder = new TopologyBuilder();
        builder.setSpout("spout", new LineSpout(spout.build()), 1);
        builder.setBolt("split", new SplitBolt(), 2).shuffleGrouping("spout");
        builder.setBolt("count", new CountBolt(), 4).fieldsGrouping("split", new Fields("word"));
        builder.setBolt("persist", new PersistBolt(peer.text("out")), 1).shuffleGrouping("count");
        peer.submit("kafka-word-count", builder.createTopology(), true, sent, 1 + 2 + 4 + 1);

        peer.warmUp(WORDS, until / 4); // of a backlog a quarter is for warming up at most
        measuring = true;
        long lines = -Counter.total(LINES);
        Peer.Rate words = peer.measure(WORDS, until);
        lines += Counter.total(LINES);
        measuring = false;

        peer.finish(FAILED, String.format(Locale.ROOT, "{\"words_per_s\":%.0f,"
                        + "\"acked_lines_per_s\":%.0f,\"words\":%d,\"failed\":%d,\"latency_ms\":%s,"
                        + "\"percentiles_ms\":%s}",
                words.perSecond(), lines / words.seconds(), Counter.total(WORDS), Counter.total(FAILED),
                Histogram.json(LATENCY), Histogram.percentiles(LATENCY)));
    }
}
