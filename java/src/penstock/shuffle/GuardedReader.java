package penstock.shuffle;

import java.io.IOException;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
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
import org.apache.spark.shuffle.streaming.StreamingShuffleClientHandler;
import org.apache.spark.shuffle.streaming.StreamingShuffleReader;
import org.apache.spark.util.ErrorNotifier;
import org.apache.spark.util.TaskCompletionListener;

import scala.Option;
import scala.runtime.AbstractFunction1;
import scala.runtime.BoxedUnit;

/** The reader's end: proves to each writer that it knows the secret before it says that it is ready. */
final class GuardedReader<K, C> extends StreamingShuffleReader<K, C> {
  private static final long TIMEOUT_MS = 30_000;
  /** Spark computes it from spark.shuffle.streaming.readerMaxMemory and the number of writers. */
  private static final Method BYTES_PER_WRITER = bytesPerWriter();

  private final Handshake handshake;
  private final int shuffleId;
  private final ConcurrentLinkedQueue<TransportClientFactory> factories = new ConcurrentLinkedQueue<>();
  /** Spark's constructor starts a thread that calls createClient, perhaps before ours has set the fields. */
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
      Handler handler = new Handler(
          mapId, context().partitionId(), shuffleId, (Long) BYTES_PER_WRITER.invoke(this));
      handler.setOnTermAckResponseHandler(new AbstractFunction1<Object, BoxedUnit>() {
        @Override
        public BoxedUnit apply(Object writer) {
          onTermAckResponse((Integer) writer);
          return BoxedUnit.UNIT;
        }
      });
      TransportClientFactory factory = new TransportContext(conf(), handler).createClientFactory();
      factories.add(factory);
      TransportClient client = factory.createClient(host, port);
      prove(client, host, port);
      client.getChannel().eventLoop().submit(() -> handler.begin(client)).sync();
      return client;
    } catch (InterruptedException | IOException | ReflectiveOperationException error) {
      throw new IllegalStateException("cannot connect to the streaming shuffle at " + host + ":" + port, error);
    }
  }

  private void prove(TransportClient client, String host, int port) {
    byte[] mine = handshake.nonce();
    ByteBuffer answer = client.sendRpcSync(Handshake.hello(mine), TIMEOUT_MS);
    byte[] theirs = new byte[answer.remaining()];
    answer.get(theirs);
    if (!handshake.fromWriter(mine, theirs)) {
      client.close();
      throw new SecurityException("the streaming shuffle at " + host + ":" + port + " does not know the secret");
    }
    byte[] nonce = java.util.Arrays.copyOf(theirs, Handshake.NONCE);
    client.sendRpcSync(ByteBuffer.wrap(handshake.proof("reader", mine, nonce)), TIMEOUT_MS);
  }

  /** As Spark's reader makes it. */
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

  private final class Handler extends StreamingShuffleClientHandler {
    Handler(int writer, int reader, int shuffleId, long bytes) {
      super(writer, reader, messageQueue(), shuffleId, bytes, GuardedReader.this.context(), errorNotifier());
    }

    /** Spark's handler sends its first message here: not before the proof. */
    @Override
    public void channelActive(TransportClient client) {}

    void begin(TransportClient client) {
      super.channelActive(client);
    }
  }
}
