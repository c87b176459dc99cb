package peers;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.stream.Stream;
import net.minidev.json.JSONValue;
import org.apache.storm.Config;
import org.apache.storm.LocalCluster;
import org.apache.storm.generated.StormTopology;
import org.apache.storm.shade.org.apache.zookeeper.server.NIOServerCnxnFactory;
import org.apache.storm.shade.org.apache.zookeeper.server.ZooKeeperServer;
import org.apache.storm.utils.VersionInfo;

/** Shared parts of the programs: options, Storm's settings, a cluster in this JVM, the measurement, the result. */
final class Peer {
    private final Map<String, String> options;
    private final Config overrides = new Config(); // --conf key=value, repeatable: to try other Storm settings
    private final Path temp = // all of Storm's state, removed on the way out
            Path.of(System.getProperty("java.io.tmpdir"), "storm-peer-" + ProcessHandle.current().pid());

    /** A number of items and the time in which they arrived. */
    record Rate(long count, double seconds) {
        double perSecond() {
            return count / seconds;
        }
    }

    Peer(String[] args, Map<String, String> defaults) {
        options = new HashMap<>(defaults);
        for (int i = 0; i < args.length; i += 2) {
            String key = args[i].replaceFirst("^--", "");
            if (i + 1 == args.length || !key.equals("conf") && !options.containsKey(key)) {
                throw new IllegalArgumentException("unknown option or missing value: " + args[i]);
            }
            if (key.equals("conf")) {
                String[] pair = args[i + 1].split("=", 2);
                overrides.put(pair[0], JSONValue.parse(pair[1])); // number, boolean or text
            } else {
                options.put(key, args[i + 1]);
            }
        }
    }

    String text(String option) {
        return options.get(option);
    }

    int number(String option) {
        return Integer.parseInt(options.get(option));
    }

    boolean flag(String option) {
        return Boolean.parseBoolean(options.get(option));
    }

    static <T> T register(Queue<T> queue, T item) {
        queue.add(item);
        return item;
    }

    /** Starts a cluster and the topology on it. {@code timed}: optimize for latency, not for throughput. */
    LocalCluster submit(String name, StormTopology topology, boolean acks, boolean timed, int executors) throws Exception {
        Config conf = flag("tuned") ? tuned(acks, timed, executors + (acks ? 1 : 0)) : stock(acks);
        if (number("max-pending") > 0) { // 0: as many as the queues take, Storm's default
            conf.setMaxSpoutPending(number("max-pending"));
        }
        conf.putAll(overrides);
        LocalCluster cluster = cluster();
        cluster.submitTopology(name, conf, topology);
        return cluster;
    }

    /** Storm's default settings. */
    private static Config stock(boolean acks) {
        Config conf = new Config();
        conf.setNumWorkers(1);
        conf.setNumAckers(acks ? 1 : 0);
        conf.put(Config.TOPOLOGY_ENABLE_MESSAGE_TIMEOUTS, true); // as clusters and new LocalCluster() have it
        return conf;
    }

    /** The settings that made Storm fastest on a 2-core machine (see README.md). */
    private static Config tuned(boolean acks, boolean timed, int executors) {
        Config conf = stock(acks);
        conf.put(Config.TOPOLOGY_DISABLE_LOADAWARE_MESSAGING, true);
        conf.put(Config.TOPOLOGY_STATS_SAMPLE_RATE, 0.0005);
        // Large batches for throughput; none at a given rate, as Storm recommends for low latency.
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

    private LocalCluster cluster() throws Exception {
        Path zkDir = Files.createDirectories(temp.resolve("zookeeper"));
        System.setProperty("java.io.tmpdir", temp.toString());
        Runtime.getRuntime().addShutdownHook(new Thread(() -> delete(temp))); // also when interrupted

        // LocalCluster's own ZooKeeper would listen on every interface, so give it one on loopback.
        InetAddress loopback = InetAddress.getByName("127.0.0.1");
        NIOServerCnxnFactory zookeeper = new NIOServerCnxnFactory();
        zookeeper.configure(new InetSocketAddress(loopback, 0), 0);
        zookeeper.startup(new ZooKeeperServer(zkDir.toFile(), zkDir.toFile(), 2000));
        return new LocalCluster.Builder()
                .withDaemonConf(Config.STORM_ZOOKEEPER_SERVERS, List.of(loopback.getHostAddress()))
                .withDaemonConf(Config.STORM_ZOOKEEPER_PORT, (long) zookeeper.getLocalPort())
                .build();
    }

    /** Waits for the first item (at most two minutes), then for --warmup seconds or until this many have arrived. */
    void warmUp(Queue<Counter> items, long until) throws InterruptedException {
        await(items, 120, 1);
        if (Counter.total(items) == 0) {
            System.err.println("nothing arrived within two minutes");
            Runtime.getRuntime().halt(1);
        }
        await(items, number("warmup"), until);
    }

    /** Measures for --seconds, or until this many have arrived in total. */
    Rate measure(Queue<Counter> items, long until) throws InterruptedException {
        long begin = System.nanoTime();
        long before = Counter.total(items);
        await(items, number("seconds"), until);
        return new Rate(Counter.total(items) - before, (System.nanoTime() - begin) / 1e9);
    }

    private static void await(Queue<Counter> items, int seconds, long until) throws InterruptedException {
        long end = System.nanoTime() + seconds * 1_000_000_000L;
        while (System.nanoTime() < end && Counter.total(items) < until) {
            Thread.sleep(Math.max(0, Math.min(10, (end - System.nanoTime()) / 1_000_000)));
        }
    }

    /**
     * Prints the result, a JSON object, with Storm's version and ends the JVM: an orderly shutdown of LocalCluster is
     * slow and saves nothing.
     */
    void finish(Queue<Counter> failed, String json) {
        if (Counter.total(failed) > 0) {
            System.err.println("failed: " + Counter.total(failed));
        }
        String storm = "{\"system\":\"storm\",\"version\":\"" + VersionInfo.getVersion() + "\",";
        System.out.println(storm + json.substring(1));
        System.out.flush();
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
