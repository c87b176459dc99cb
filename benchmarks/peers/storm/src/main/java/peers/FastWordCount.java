package peers;

import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Queue;
import java.util.Random;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.locks.LockSupport;
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
    static final long SLICE_NANOS = 4_000_000;
    static boolean timed; // --rate given: tuples carry their emit time
    static double rate;   // sentences per second of each spout task; 0 = as fast as possible
    static long wordNanos; // for which a count waits after each word, as for a call to another system
    static volatile boolean measuring; // latencies are recorded only while this is set
    static final Queue<Counter> SENTENCES = new ConcurrentLinkedQueue<>(); // fully acked, or split if no acks
    static final Queue<Counter> WORDS = new ConcurrentLinkedQueue<>();
    static final Queue<Counter> FAILED = new ConcurrentLinkedQueue<>();
    static final Queue<Histogram> LATENCY = new ConcurrentLinkedQueue<>();
    static final Queue<Histogram> ACK_LATENCY = new ConcurrentLinkedQueue<>();

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
                acked = Peer.register(SENTENCES, new Counter());
                failed = Peer.register(FAILED, new Counter());
                latency = Peer.register(ACK_LATENCY, new Histogram());
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
            split = acks ? new Counter() : Peer.register(SENTENCES, new Counter()); // with acks the spout counts
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
        private long owed; // nanoseconds of waiting, saved up because short waits are inexact

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            out = collector;
            counts = new HashMap<>();
            words = Peer.register(WORDS, new Counter());
            latency = Peer.register(LATENCY, new Histogram());
        }

        @Override
        public void execute(Tuple tuple) {
            String word = tuple.getString(0);
            long[] count = counts.get(word);
            if (count == null) {
                counts.put(word, count = new long[1]);
            }
            count[0]++;
            owed += wordNanos;
            while (owed > SLICE_NANOS) {
                long begun = System.nanoTime();
                LockSupport.parkNanos(owed);
                owed -= System.nanoTime() - begun;
            }
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

    public static void main(String[] args) throws Exception {
        Map<String, String> defaults = new HashMap<>(Map.of("spouts", "1", "splits", "1", "counts", "1", "acks", "false",
                "rate", "0", "max-pending", "5000", "warmup", "10", "seconds", "10", "tuned", "true"));
        defaults.put("word-us", "0");
        Peer peer = new Peer(args, defaults);
        int spouts = peer.number("spouts");
        int splits = peer.number("splits");
        int counts = peer.number("counts");
        acks = peer.flag("acks");
        wordNanos = peer.number("word-us") * 1_000L;
        rate = Double.parseDouble(peer.text("rate")) / spouts;
        timed = rate > 0;

        TopologyBuilder builder = new TopologyBuilder();
        builder.setSpout("spout", new SentenceSpout(), spouts);
        builder.setBolt("split", new SplitBolt(), splits).shuffleGrouping("spout");
        builder.setBolt("count", new CountBolt(), counts).fieldsGrouping("split", new Fields("word"));
        peer.submit("fast-word-count", builder.createTopology(), acks, timed, spouts + splits + counts);

        peer.warmUp(WORDS, Long.MAX_VALUE);
        measuring = true;
        long sentences = -Counter.total(SENTENCES);
        Peer.Rate words = peer.measure(WORDS, Long.MAX_VALUE);
        sentences += Counter.total(SENTENCES);
        measuring = false;

        peer.finish(FAILED, String.format(Locale.ROOT, "{\"spouts\":%d,"
                        + "\"splits\":%d,\"counts\":%d,\"acks\":%b,\"sentences_per_s\":%.0f,\"words_per_s\":%.0f,"
                        + "\"failed\":%d,\"latency_ms\":%s,\"ack_latency_ms\":%s}",
                spouts, splits, counts, acks, sentences / words.seconds(), words.perSecond(), Counter.total(FAILED),
                timed ? Histogram.json(LATENCY) : "null", timed && acks ? Histogram.json(ACK_LATENCY) : "null"));
    }
}
