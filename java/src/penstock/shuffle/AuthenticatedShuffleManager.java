package penstock.shuffle;

import java.util.concurrent.atomic.AtomicReference;

import org.apache.spark.SparkConf;
import org.apache.spark.TaskContext;
import org.apache.spark.shuffle.BaseShuffleHandle;
import org.apache.spark.shuffle.ShuffleHandle;
import org.apache.spark.shuffle.ShuffleReadMetricsReporter;
import org.apache.spark.shuffle.ShuffleReader;
import org.apache.spark.shuffle.ShuffleWriteMetricsReporter;
import org.apache.spark.shuffle.ShuffleWriter;
import org.apache.spark.shuffle.streaming.StreamingShuffleManager;
import org.apache.spark.shuffle.streaming.StreamingShuffleServerHandler;
import org.apache.spark.shuffle.streaming.StreamingShuffleWriter;
import org.apache.spark.util.ErrorNotifier;

import scala.Option;
import scala.runtime.AbstractFunction2;
import scala.runtime.BoxedUnit;

/**
 * Spark's streaming shuffle with authentication: readers and writers prove to each other that they know the session's
 * secret before any message of the shuffle is handled. Spark's own shuffle accepts every connection, and one invalid
 * frame ends the query.
 *
 * Spark creates one in the driver and in each executor, by the setting spark.shuffle.manager.incremental.
 */
public final class AuthenticatedShuffleManager extends StreamingShuffleManager {
  /** Hexadecimal. Because of the setting's name Spark hides its value where settings are displayed. */
  static final String SECRET = "spark.penstock.shuffle.secret";
  /** Listen on 127.0.0.1 only, because driver and executors are on one machine. */
  static final String LOOPBACK = "spark.penstock.shuffle.loopback";

  private final Handshake handshake;

  public AuthenticatedShuffleManager(SparkConf conf) {
    String secret = conf.get(SECRET, "");
    if (secret.isEmpty()) {
      throw new IllegalArgumentException(SECRET + " must be set: let Penstock open the Spark session");
    }
    handshake = new Handshake(Handshake.fromHex(secret));
    if (conf.getBoolean(LOOPBACK, false)) {
      Loopback.listenThereOnly();
    }
  }

  @Override
  public <K, V> ShuffleWriter<K, V> getWriter(
      ShuffleHandle handle, long mapId, TaskContext context, ShuffleWriteMetricsReporter metrics) {
    ErrorNotifier errors = new ErrorNotifier();
    AtomicReference<StreamingShuffleWriter<K, V>> made = new AtomicReference<>();
    int readers = ((BaseShuffleHandle<?, ?, ?>) handle).dependency().partitioner().numPartitions();
    StreamingShuffleServerHandler handler = new GuardedServerHandler(
        handshake,
        new AbstractFunction2<Object, Object, BoxedUnit>() {
          @Override
          public BoxedUnit apply(Object reader, Object number) {
            // A reader acknowledges the end, which the writer sends long after it was created.
            made.get().onTerminationAckReceived((Integer) reader, (Long) number);
            return BoxedUnit.UNIT;
          }
        },
        handle.shuffleId(), readers, context, errors);
    made.set(new StreamingShuffleWriter<>(handle, mapId, context, Option.apply(handler), errors));
    return made.get();
  }

  @Override
  public <K, C> ShuffleReader<K, C> getReader(
      ShuffleHandle handle, int startMap, int endMap, int startPartition, int endPartition,
      TaskContext context, ShuffleReadMetricsReporter metrics) {
    return new GuardedReader<>(handshake, handle, context);
  }
}
