package peers;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Instant;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Queue;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.locks.LockSupport;
import org.apache.storm.LocalCluster;
import org.apache.storm.generated.RebalanceOptions;
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

/**
 * The scaling experiment of Lu 2020, section 6.4, on Storm: split and count are slow, the load rises and falls in
  * steps, and {@code rebalance} changes the number of executors at given times. Arrivals at the last bolt are written to
  * --out: ⟨when it arrived, when its line was due, line times words plus position in the line, count⟩ per word, four
  * little-endian 64-bit numbers, the first two in microseconds since 1970. Penstock's benchmark writes the same format.
 */
public final class Rebalance {
    // Options and measurements are static: LocalCluster runs every task in this JVM.
    static int words; // words per line
    static double splitSeconds; // seconds per line
    static double countSeconds; // seconds per word
    static Path out;
    static Source source;
    static final Queue<Counter> FAILED = new ConcurrentLinkedQueue<>();
    static final Queue<Counter> ARRIVED = new ConcurrentLinkedQueue<>();

    static long micros() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
    }

    /**
     * The source of the lines. Like a log, lines fall due at a schedule whether or not they are read, and a line that is
      * not acked is read again by the spout's next task. The source outlives that task.
     */
    static final class Source {
        private final double[] seconds; // since the beginning, at the end of each step
        private final double[] rates;   // lines per second in each step
        private final Deque<Long> again = new ArrayDeque<>();
        private final TreeSet<Long> open = new TreeSet<>();
        private long begun; // µs
        private long next;

        /** {@code text}: seconds:rate,seconds:rate,… */
        Source(String text) {
            String[] steps = text.split(",");
            seconds = new double[steps.length];
            rates = new double[steps.length];
            double end = 0;
            for (int i = 0; i < steps.length; i++) {
                String[] pair = steps[i].split(":");
                seconds[i] = end += Double.parseDouble(pair[0]);
                rates[i] = Double.parseDouble(pair[1]);
            }
        }

        double length() {
            return seconds[seconds.length - 1];
        }

        /** Called when a new task of the spout begins: lines in flight in the previous task are read again. */
        synchronized void read() {
            begun = begun == 0 ? micros() : begun;
            again.addAll(open);
            open.clear();
        }

        synchronized long begun() {
            return begun;
        }

        /** The next line that is due, or -1. */
        synchronized long take() {
            long line;
            if (!again.isEmpty()) {
                line = again.poll();
            } else if (micros() >= due(next)) {
                line = next++;
            } else {
                return -1;
            }
            open.add(line);
            return line;
        }

        synchronized void done(long line) {
            open.remove(line);
        }

        synchronized void failed(long line) {
            if (open.remove(line)) {
                again.add(line);
            }
        }

        /** When a line is due, in microseconds since 1970. */
        synchronized long due(long line) {
            double begin = 0;
            double left = line;
            for (int i = 0; i < rates.length; i++) {
                double inStep = (seconds[i] - begin) * rates[i];
                if (left < inStep) {
                    return begun + (long) ((begin + left / rates[i]) * 1e6);
                }
                left -= inStep;
                begin = seconds[i];
            }
            return Long.MAX_VALUE;
        }
    }

    /** Waits for a given time per tuple; if a wait takes too long, the next one is shorter. */
    static final class Slowness {
        private final double seconds;
        private double overslept;

        Slowness(double seconds) {
            this.seconds = seconds;
        }

        void take() {
            double wanted = seconds - overslept;
            if (wanted <= 0) {
                overslept = -wanted;
                return;
            }
            long begin = System.nanoTime();
            LockSupport.parkNanos((long) (wanted * 1e9));
            overslept = (System.nanoTime() - begin) * 1e-9 - wanted;
        }
    }

    /** Emits one line per call, if one is due. */
    static final class LineSpout extends BaseRichSpout {
        private transient SpoutOutputCollector collector;
        private transient Counter failed;

        @Override
        public void open(Map<String, Object> conf, TopologyContext context, SpoutOutputCollector collector) {
            this.collector = collector;
            failed = Peer.register(FAILED, new Counter());
            source.read();
        }

        @Override
        public void nextTuple() {
            long line = source.take();
            if (line >= 0) {
                collector.emit(new Values(line, source.due(line)), line);
            }
        }

        @Override
        public void ack(Object id) {
            source.done((Long) id);
        }

        @Override
        public void fail(Object id) {
            failed.increment();
            source.failed((Long) id);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(new Fields("line", "since"));
        }
    }

    /** Splits a line into words, which are numbers here: the word is derived from the number. */
    static final class SplitBolt extends BaseRichBolt {
        private transient OutputCollector collector;
        private transient Slowness slowness;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            this.collector = collector;
            slowness = new Slowness(splitSeconds);
        }

        @Override
        public void execute(Tuple tuple) {
            slowness.take();
            long first = tuple.getLong(0) * words;
            for (long result = first; result < first + words; result++) {
                long mixed = result * 0x9E3779B97F4A7C15L;
                String word = "w" + Long.remainderUnsigned(mixed ^ mixed >>> 29, 10_000);
                collector.emit(tuple, new Values(result, word, tuple.getValue(1)));
            }
            collector.ack(tuple);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(new Fields("result", "word", "since"));
        }
    }

    /** Counts in a HashMap, which is lost at a rebalance: Storm keeps no state here. */
    static final class CountBolt extends BaseRichBolt {
        private transient OutputCollector collector;
        private transient HashMap<String, Long> counts;
        private transient Slowness slowness;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            this.collector = collector;
            counts = new HashMap<>();
            slowness = new Slowness(countSeconds);
        }

        @Override
        public void execute(Tuple tuple) {
            slowness.take();
            Long count = counts.merge(tuple.getString(1), 1L, Long::sum);
            collector.emit(tuple, new Values(tuple.getValue(0), count, tuple.getValue(2)));
            collector.ack(tuple);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
            d.declare(new Fields("result", "count", "since"));
        }
    }

    /** Records arrivals and their times. */
    static final class ArrivalBolt extends BaseRichBolt {
        private transient OutputCollector collector;
        private transient FileChannel file;
        private transient ByteBuffer row;
        private transient Counter arrived;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector collector) {
            this.collector = collector;
            row = ByteBuffer.allocate(4 * Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
            arrived = Peer.register(ARRIVED, new Counter());
            try {
                file = FileChannel.open(out, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
            } catch (IOException e) {
                throw new UncheckedIOException(e);
            }
        }

        @Override
        public void execute(Tuple tuple) {
            row.clear();
            row.putLong(micros()).putLong(tuple.getLong(2)).putLong(tuple.getLong(0)).putLong(tuple.getLong(1)).flip();
            try {
                file.write(row);
            } catch (IOException e) {
                throw new UncheckedIOException(e);
            }
            arrived.increment();
            collector.ack(tuple);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer d) {
        }
    }

    /** A time from which split and count have this many executors. */
    record Change(double at, int executors) {
    }

    /** {@code text}: seconds:executors,…; may be empty. */
    private static List<Change> changes(String text) {
        List<Change> found = new ArrayList<>();
        for (String each : text.isEmpty() ? new String[0] : text.split(",")) {
            String[] pair = each.split(":");
            found.add(new Change(Double.parseDouble(pair[0]), Integer.parseInt(pair[1])));
        }
        return found;
    }

    private static void until(double seconds) throws InterruptedException {
        Thread.sleep(Math.max(0, (long) ((source.begun() + seconds * 1e6 - micros()) / 1000)));
    }

    public static void main(String[] args) throws Exception {
        Peer peer = new Peer(args, Map.ofEntries(Map.entry("schedule", "10:50,10:100,10:50"),
                Map.entry("changes", "12:2"), Map.entry("wait", "-1"), Map.entry("tasks", "8"),
                Map.entry("words", "4"), Map.entry("split-ms", "10"), Map.entry("count-ms", "2.5"),
                Map.entry("out", "arrivals"), Map.entry("max-pending", "0"), Map.entry("tail", "10"),
                Map.entry("warmup", "0"), Map.entry("seconds", "0"), Map.entry("tuned", "false")));
        words = peer.number("words");
        splitSeconds = Double.parseDouble(peer.text("split-ms")) / 1000;
        countSeconds = Double.parseDouble(peer.text("count-ms")) / 1000;
        out = Path.of(peer.text("out"));
        source = new Source(peer.text("schedule"));

        int tasks = peer.number("tasks"); // the maximum number of executors: a rebalance does not change the tasks
        TopologyBuilder builder = new TopologyBuilder();
        builder.setSpout("lines", new LineSpout(), 1);
        builder.setBolt("split", new SplitBolt(), 1).setNumTasks(tasks).shuffleGrouping("lines");
        builder.setBolt("count", new CountBolt(), 1).setNumTasks(tasks).fieldsGrouping("split", new Fields("word"));
        builder.setBolt("arrivals", new ArrivalBolt(), 1).globalGrouping("count");
        LocalCluster cluster = peer.submit("rebalance", builder.createTopology(), true, true, 4);
        peer.warmUp(ARRIVED, Long.MAX_VALUE);

        StringBuilder done = new StringBuilder();
        for (Change change : changes(peer.text("changes"))) {
            until(change.at());
            RebalanceOptions options = new RebalanceOptions();
            options.set_num_executors(Map.of("split", change.executors(), "count", change.executors()));
            if (peer.number("wait") >= 0) { // otherwise Storm's default: the message timeout
                options.set_wait_secs(peer.number("wait"));
            }
            done.append(done.isEmpty() ? "" : ",").append(String.format(Locale.ROOT, "{\"at\":%d,\"executors\":%d}",
                    micros(), change.executors()));
            cluster.rebalance("rebalance", options);
        }
        until(source.length() + peer.number("tail")); // time for late results
        peer.finish(FAILED, String.format(Locale.ROOT, "{\"begun\":%d,"
                        + "\"ended\":%d,\"failed\":%d,\"arrived\":%d,\"changes\":[%s]}",
                source.begun(), micros(), Counter.total(FAILED), Counter.total(ARRIVED), done));
    }
}
