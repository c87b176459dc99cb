package peers;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Queue;
import java.util.Random;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.stream.Stream;
import net.minidev.json.JSONValue;
import org.apache.storm.Config;
import org.apache.storm.LocalCluster;
import org.apache.storm.shade.org.apache.zookeeper.server.NIOServerCnxnFactory;
import org.apache.storm.shade.org.apache.zookeeper.server.ZooKeeperServer;
import org.apache.storm.spout.SpoutOutputCollector;
import org.apache.storm.task.OutputCollector;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.topology.OutputFieldsDeclarer;
import org.apache.storm.topology.TopologyBuilder;
import org.apache.storm.topology.base.BaseRichBolt;
import org.apache.storm.topology.base.BaseRichSpout;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Tuple;
import org.apache.storm.tuple.Values;

/** FastWordCount on Apache Storm's LocalCluster: one JVM, one worker, one JSON line on stdout. */
public final class FastWordCount {
    // Options and measurements are static: LocalCluster runs every task in this JVM.
    static boolean acks;
    static boolean timed; // --rate given: tuples carry their emit time
    static double rate;   // sentences per second of each spout task; 0 = flat out
    static volatile boolean measuring; // latencies are recorded only while this is set
    static final Queue<Counter> SENTENCES = new ConcurrentLinkedQueue<>(); // fully acked, or split if no acks
    static final Queue<Counter> WORDS = new ConcurrentLinkedQueue<>();
    static final Queue<Counter> FAILED = new ConcurrentLinkedQueue<>();
    static final Queue<Histogram> LATENCY = new ConcurrentLinkedQueue<>();
    static final Queue<Histogram> ACK_LATENCY = new ConcurrentLinkedQueue<>();

    /** A counter with one writer (its task), alone on its cache lines: slot 16 of a 32-slot array. */
    static final class Counter {
        private final AtomicLongArray cells = new AtomicLongArray(32);

        void increment() {
            cells.setRelease(16, cells.getPlain(16) + 1); // single writer: no atomic add needed
        }

        static long total(Queue<Counter> counters) {
            return counters.stream().mapToLong(c -> c.cells.getAcquire(16)).sum();
        }
    }

    /** Log-linear histogram of nanoseconds, 64 steps per power of two (error below 1.6 %); one writer. */
    static final class Histogram {
        private final long[] buckets = new long[64 * 64];

        void record(long nanos) {
            long v = Math.max(nanos, 0) + 64; // the offset keeps small values linear
            int shift = 57 - Long.numberOfLeadingZeros(v); // leaves v >>> shift in 64..127
            buckets[shift * 64 + (int) (v >>> shift) - 64]++;
        }

        /** The given quantile of several histograms taken together, in milliseconds. */
        static double quantileMs(Queue<Histogram> parts, double q) {
            long total = parts.stream().flatMapToLong(h -> Arrays.stream(h.buckets)).sum();
            long seen = 0;
            for (int i = 0; i < 64 * 64 && total > 0; i++) {
                for (Histogram h : parts) {
                    seen += h.buckets[i];
                }
                if (seen >= q * total) {
                    return ((i % 64 + 64L << i / 64) - 64) / 1e6;
                }
            }
            return 0;
        }

        static String json(Queue<Histogram> parts) {
            return String.format(Locale.ROOT, "{\"p50\":%.3f,\"p99\":%.3f}",
                    quantileMs(parts, 0.50), quantileMs(parts, 0.99));
        }
    }

    static <T> T register(Queue<T> queue, T item) {
        queue.add(item);
        return item;
    }

    /** Emits one sentence per call; with a rate, only when one is due, stamped with its emit time. */
    static final class SentenceSpout extends BaseRichSpout {
        private transient SpoutOutputCollector out;
        private transient String[] sentences;
        private transient Counter acked;
        private transient Counter failed;
        private transient Histogram latency;
        private long random;
        private long started;
        private long emitted;

        @Override
        public void open(Map<String, Object> conf, TopologyContext context, SpoutOutputCollector collector) {
            out = collector;
            sentences = makeSentences(1000, new Random(42));
            random = 0x9E3779B97F4A7C15L * (context.getThisTaskId() + 1);
            if (acks) {
                acked = register(SENTENCES, new Counter());
                failed = register(FAILED, new Counter());
                latency = register(ACK_LATENCY, new Histogram());
            }
        }

        private static String[] makeSentences(int count, Random rng) {
            String[] made = new String[count];
            for (int i = 0; i < count; i++) {
                int target = 50 + rng.nextInt(43); // at most 91, + a space and a word of 8: 50..100 bytes
                StringBuilder text = new StringBuilder();
                while (text.length() < target) {
                    text.append(text.length() > 0 ? " " : "");
                    for (int n = 3 + rng.nextInt(6); n > 0; n--) {
                        text.append((char) ('a' + rng.nextInt(26)));
                    }
                }
                made[i] = text.toString();
            }
            return made;
        }

        @Override
        public void nextTuple() {
            Long time = null;
            if (timed) {
                long now = System.nanoTime();
                started = started == 0 ? now : started;
                if ((now - started) * 1e-9 * rate < emitted) {
                    return; // not due yet: Storm applies its spout wait strategy
                }
                emitted++;
                time = now;
            }
            random ^= random << 13; // xorshift64
            random ^= random >>> 7;
            random ^= random << 17;
            String sentence = sentences[(int) ((random >>> 32) * sentences.length >>> 32)];
            Values values = timed ? new Values(sentence, time) : new Values(sentence);
            if (acks) {
                out.emit(values, timed ? time : Boolean.TRUE); // any non-null message id asks for tracking
            } else {
                out.emit(values);
            }
        }

        @Override
        public void ack(Object id) {
            acked.increment();
            if (timed && measuring) {
                latency.record(System.nanoTime() - (Long) id); // the id is the emit time
            }
        }

        @Override
        public void fail(Object id) {
            failed.increment();
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(timed ? new Fields("sentence", "time") : new Fields("sentence"));
        }
    }

    /** Splits on spaces; one tuple per word, anchored only when acks are on. */
    static final class SplitBolt extends BaseRichBolt {
        private transient OutputCollector out;
        private transient Counter split;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            out = collector;
            split = acks ? new Counter() : register(SENTENCES, new Counter()); // with acks the spout counts
        }

        @Override
        public void execute(Tuple tuple) {
            String text = tuple.getString(0);
            Object time = timed ? tuple.getValue(1) : null;
            for (int from = 0, to; from < text.length(); from = to + 1) {
                int space = text.indexOf(' ', from);
                to = space < 0 ? text.length() : space;
                String word = text.substring(from, to);
                Values values = timed ? new Values(word, time) : new Values(word);
                if (acks) {
                    out.emit(tuple, values);
                } else {
                    out.emit(values);
                }
            }
            split.increment();
            if (acks) {
                out.ack(tuple);
            }
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(timed ? new Fields("word", "time") : new Fields("word"));
        }
    }

    /** Counts words in a HashMap; emits nothing. */
    static final class CountBolt extends BaseRichBolt {
        private transient OutputCollector out;
        private transient HashMap<String, long[]> counts;
        private transient Counter words;
        private transient Histogram latency;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            out = collector;
            counts = new HashMap<>();
            words = register(WORDS, new Counter());
            latency = register(LATENCY, new Histogram());
        }

        @Override
        public void execute(Tuple tuple) {
            String word = tuple.getString(0);
            long[] count = counts.get(word);
            if (count == null) {
                counts.put(word, count = new long[1]);
            }
            count[0]++;
            words.increment();
            if (timed && measuring) {
                latency.record(System.nanoTime() - tuple.getLong(1));
            }
            if (acks) {
                out.ack(tuple);
            }
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
        }
    }

    /** Storm as it comes. */
    private static Config stock() {
        Config conf = new Config();
        conf.setNumWorkers(1);
        conf.setNumAckers(acks ? 1 : 0);
        return conf;
    }

    /** The settings that made Storm fastest on a 2-core machine (see README.md). */
    private static Config tuned(int executors) {
        Config conf = new Config();
        conf.setNumWorkers(1);
        conf.setNumAckers(acks ? 1 : 0);
        conf.put(Config.TOPOLOGY_ENABLE_MESSAGE_TIMEOUTS, true); // as new LocalCluster() has it
        conf.put(Config.TOPOLOGY_DISABLE_LOADAWARE_MESSAGING, true);
        conf.put(Config.TOPOLOGY_STATS_SAMPLE_RATE, 0.0005);
        // Flat out, large batches; at a given rate none, which is Storm's own advice for low latency.
        conf.put(Config.TOPOLOGY_PRODUCER_BATCH_SIZE, timed ? 1 : 1000);
        if (timed) { // an idle spout parks 0.1 ms rather than sleeping 1 ms
            conf.put(Config.TOPOLOGY_SPOUT_WAIT_STRATEGY, "org.apache.storm.policy.WaitStrategyPark");
        } else if (!acks || executors > 2 * Runtime.getRuntime().availableProcessors()) {
            // Starved or blocked threads sleep 1 ms at once and leave the cores to the others. (With acks and
            // few threads Storm's default is faster: park briefly many times first.)
            conf.put(Config.TOPOLOGY_BOLT_WAIT_PROGRESSIVE_LEVEL2_COUNT, 0);
            conf.put(Config.TOPOLOGY_BACKPRESSURE_WAIT_PROGRESSIVE_LEVEL2_COUNT, 0);
        }
        return conf;
    }

    public static void main(String[] args) throws Exception {
        Map<String, String> opts = new HashMap<>(Map.of("spouts", "1", "splits", "1", "counts", "1", "acks", "false",
                "max-pending", "5000", "warmup", "10", "seconds", "10", "rate", "0", "tuned", "true"));
        Config overrides = new Config(); // --conf key=value, repeatable: to try other Storm settings
        for (int i = 0; i < args.length; i += 2) {
            String key = args[i].replaceFirst("^--", "");
            if (i + 1 == args.length || !key.equals("conf") && !opts.containsKey(key)) {
                throw new IllegalArgumentException("unknown option or missing value: " + args[i]);
            }
            if (key.equals("conf")) {
                String[] pair = args[i + 1].split("=", 2);
                overrides.put(pair[0], JSONValue.parse(pair[1])); // number, boolean or text
            } else {
                opts.put(key, args[i + 1]);
            }
        }
        int spouts = Integer.parseInt(opts.get("spouts"));
        int splits = Integer.parseInt(opts.get("splits"));
        int counts = Integer.parseInt(opts.get("counts"));
        acks = Boolean.parseBoolean(opts.get("acks"));
        rate = Double.parseDouble(opts.get("rate")) / spouts;
        timed = rate > 0;

        // All of Storm's state goes below one temporary directory, removed on the way out.
        Path temp = Path.of(System.getProperty("java.io.tmpdir"), "storm-peer-" + ProcessHandle.current().pid());
        Path zkDir = Files.createDirectories(temp.resolve("zookeeper"));
        System.setProperty("java.io.tmpdir", temp.toString());
        Runtime.getRuntime().addShutdownHook(new Thread(() -> delete(temp))); // also when interrupted

        // LocalCluster's own ZooKeeper would listen on every interface, so give it one on loopback.
        InetAddress loopback = InetAddress.getByName("127.0.0.1");
        NIOServerCnxnFactory zookeeper = new NIOServerCnxnFactory();
        zookeeper.configure(new InetSocketAddress(loopback, 0), 0);
        zookeeper.startup(new ZooKeeperServer(zkDir.toFile(), zkDir.toFile(), 2000));
        LocalCluster cluster = new LocalCluster.Builder()
                .withDaemonConf(Config.STORM_ZOOKEEPER_SERVERS, List.of(loopback.getHostAddress()))
                .withDaemonConf(Config.STORM_ZOOKEEPER_PORT, (long) zookeeper.getLocalPort())
                .build();

        TopologyBuilder builder = new TopologyBuilder();
        builder.setSpout("spout", new SentenceSpout(), spouts);
        builder.setBolt("split", new SplitBolt(), splits).shuffleGrouping("spout");
        builder.setBolt("count", new CountBolt(), counts).fieldsGrouping("split", new Fields("word"));
        Config conf = Boolean.parseBoolean(opts.get("tuned")) ? tuned(spouts + splits + counts + (acks ? 1 : 0)) : stock();
        conf.setMaxSpoutPending(Integer.parseInt(opts.get("max-pending")));
        conf.putAll(overrides);
        cluster.submitTopology("fast-word-count", conf, builder.createTopology());

        while (Counter.total(WORDS) == 0) { // the clock starts with the first counted word
            Thread.sleep(50);
        }
        Thread.sleep(Long.parseLong(opts.get("warmup")) * 1000);
        measuring = true;
        long begin = System.nanoTime();
        long sentences = -Counter.total(SENTENCES);
        long words = -Counter.total(WORDS);
        Thread.sleep(Long.parseLong(opts.get("seconds")) * 1000);
        sentences += Counter.total(SENTENCES);
        words += Counter.total(WORDS);
        double elapsed = (System.nanoTime() - begin) / 1e9;
        measuring = false;

        if (Counter.total(FAILED) > 0) {
            System.err.println("failed sentences: " + Counter.total(FAILED));
        }
        System.out.printf(Locale.ROOT, "{\"system\":\"storm\",\"version\":\"2.8.2\",\"spouts\":%d,\"splits\":%d,"
                        + "\"counts\":%d,\"acks\":%b,\"sentences_per_s\":%.0f,\"words_per_s\":%.0f,"
                        + "\"latency_ms\":%s,\"ack_latency_ms\":%s}%n",
                spouts, splits, counts, acks, sentences / elapsed, words / elapsed,
                timed ? Histogram.json(LATENCY) : "null", timed && acks ? Histogram.json(ACK_LATENCY) : "null");
        System.out.flush();
        // An orderly shutdown of LocalCluster is slow and has nothing to save: drop its state and stop the JVM.
        delete(temp);
        Runtime.getRuntime().halt(0);
    }

    /** Deletes a tree; Storm's threads may still be writing there, hence several attempts. */
    private static void delete(Path dir) {
        for (int attempt = 0; attempt < 10 && Files.exists(dir); attempt++) {
            try (Stream<Path> tree = Files.walk(dir)) {
                tree.sorted(Comparator.reverseOrder()).forEach(path -> path.toFile().delete());
            } catch (IOException | UncheckedIOException e) {
                // a file vanished during the walk: try again
            }
        }
    }
}
