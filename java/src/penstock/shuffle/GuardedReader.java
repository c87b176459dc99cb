package penstock.shuffle;

import java.io.IOException;
import java.lang.reflect.Method;
import java.util.concurrent.ConcurrentLinkedQueue;

import org.apache.spark.SparkConf;
import org.apache.spark.SparkEnv;
import org.apache.spark.TaskContext;
import org.apache.spark.network.TransportContext;
import org.apache.spark.network.client.TransportClient;
import org.apache.spark.network.client.TransportClientFactory;
import org.apache.spark.network.netty.SparkTransportConf;
import org.apache.spark.network.netty.SparkTransportConf$;
import org.apache.spark.network.util.TransportConf;
import org.apache.spark.shuffle.ShuffleHandle;
import org.apache.spark.shuffle.streaming.StreamingShuffleReader;
import org.apache.spark.util.ErrorNotifier;
import org.apache.spark.util.TaskCompletionListener;

import scala.Option;
import scala.runtime.AbstractFunction1;
import scala.runtime.BoxedUnit;

/** The reader's end: authenticates with each writer before it announces that it is ready. */
final class GuardedReader<K, C> extends StreamingShuffleReader<K, C> {
  /** Spark computes it from spark.shuffle.streaming.readerMaxMemory and the number of writers. */
  private static final Method BYTES_PER_WRITER = bytesPerWriter();

  private final Handshake handshake;
  private final int shuffleId;
  private final ConcurrentLinkedQueue<TransportClientFactory> factories = new ConcurrentLinkedQueue<>();
  /** Spark's constructor starts a thread that calls createClient, possibly before our constructor has set the fields. */
  private volatile boolean ready;

  GuardedReader(Handshake handshake, ShuffleHandle handle, TaskContext context) {
    super(handle, context, Option.empty(), new ErrorNotifier());
    this.handshake = handshake;
    this.shuffleId = handle.shuffleId();
    context.addTaskCompletionListener(new TaskCompletionListener() {
      @Override
      public void onTaskCompletion(TaskContext ended) {
        factories.forEach(TransportClientFactory::close);
      }
    });
    ready = true;
  }

  @Override
  public TransportClient createClient(int mapId, String host, int port) {
    try {
      while (!ready) {
        Thread.sleep(1);
      }
      GuardedClientHandler handler = new GuardedClientHandler(
          mapId, context().partitionId(), messageQueue(), shuffleId, (Long) BYTES_PER_WRITER.invoke(this), context(),
          errorNotifier());
      handler.setOnTermAckResponseHandler(new AbstractFunction1<Object, BoxedUnit>() {
        @Override
        public BoxedUnit apply(Object writer) {
          onTermAckResponse((Integer) writer);
          return BoxedUnit.UNIT;
        }
      });
      TransportClientFactory factory = new TransportContext(conf(), handler).createClientFactory();
      factories.add(factory);
      return handler.connect(factory, handshake, host, port, GuardedClientHandler.PAUSES_MS);
    } catch (InterruptedException | IOException | ReflectiveOperationException error) {
      throw new IllegalStateException("cannot connect to the streaming shuffle at " + host + ":" + port, error);
    }
  }

  /** As Spark's reader creates it. */
  private TransportConf conf() {
    SparkConf conf = SparkEnv.get().conf();
    Option<String> role = "driver".equals(SparkEnv.get().executorId()) ? Option.apply("driver") : Option.apply("executor");
    return SparkTransportConf.fromSparkConf(
        conf, "streaming-shuffle-reader-" + shuffleId + "-" + context().partitionId(), 1, role,
        SparkTransportConf$.MODULE$.fromSparkConf$default$5());
  }

  private static Method bytesPerWriter() {
    try {
      Method found = StreamingShuffleReader.class.getDeclaredMethod("perWriterByteLimit");
      found.setAccessible(true);
      return found;
    } catch (ReflectiveOperationException error) {
      throw new ExceptionInInitializerError(error);
    }
  }
}
