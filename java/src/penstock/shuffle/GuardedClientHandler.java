package penstock.shuffle;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.concurrent.LinkedBlockingQueue;

import io.netty.channel.Channel;

import org.apache.spark.TaskContext;
import org.apache.spark.network.client.RpcResponseCallback;
import org.apache.spark.network.client.TransportClient;
import org.apache.spark.network.client.TransportClientFactory;
import org.apache.spark.network.shuffle.streaming.StreamingShuffleMessage;
import org.apache.spark.shuffle.streaming.StreamingShuffleClientHandler;
import org.apache.spark.util.ErrorNotifier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The reader's end of the connection to one writer. It passes messages to Spark's handler only after the writer has
 * proved that it knows the secret. Another process may listen at the writer's address: its messages are not handled, and
 * the end of its connection is not an error of the shuffle; connect throws in that case.
 */
final class GuardedClientHandler extends StreamingShuffleClientHandler {
  /**
   * Milliseconds between two attempts to connect. A writer closes an unauthenticated connection if there are too many of
   * them.
   */
  static final long[] PAUSES_MS = {100, 300, 1_000, 3_000};
  private static final long TIMEOUT_MS = 30_000;
  private static final Logger LOG = LoggerFactory.getLogger(GuardedClientHandler.class);

  /** The connection whose other end is authenticated; an earlier attempt may not have ended yet. */
  private volatile Channel proven;

  GuardedClientHandler(
      int writer, int reader, LinkedBlockingQueue<StreamingShuffleMessage> queue, int shuffleId, long bytes,
      TaskContext context, ErrorNotifier errors) {
    super(writer, reader, queue, shuffleId, bytes, context, errors);
  }

  /**
   * Connects, authenticates both ends, and sends the first message of Spark's handler. A connection that ends before it is
   * authenticated is tried again. Called once.
   */
  TransportClient connect(
      TransportClientFactory factory, Handshake handshake, String host, int port, long[] pausesMs)
      throws IOException, InterruptedException {
    for (int attempt = 0; ; attempt++) {
      TransportClient client = factory.createClient(host, port);
      try {
        prove(client, handshake, host, port);
        begin(client);
        return client;
      } catch (RuntimeException error) {
        client.close();
        if (attempt == pausesMs.length || !connectionEnded(error)) {
          throw error;
        }
      }
      Thread.sleep(pausesMs[attempt]);
    }
  }

  private void prove(TransportClient client, Handshake handshake, String host, int port) {
    byte[] mine = handshake.nonce();
    ByteBuffer answer = client.sendRpcSync(Handshake.hello(mine), TIMEOUT_MS);
    byte[] theirs = new byte[answer.remaining()];
    answer.get(theirs);
    if (!handshake.fromWriter(mine, theirs)) {
      throw new SecurityException("the streaming shuffle at " + host + ":" + port + " does not know the secret");
    }
    byte[] nonce = Arrays.copyOf(theirs, Handshake.NONCE);
    client.sendRpcSync(ByteBuffer.wrap(handshake.proof("reader", mine, nonce)), TIMEOUT_MS);
  }

  /** Runs on the connection's thread: the connection's end is either seen here or reported as an error later. */
  private void begin(TransportClient client) throws InterruptedException {
    client.getChannel().eventLoop().submit(() -> {
      if (!client.getChannel().isActive()) {
        throw new IllegalStateException(new IOException("the connection ended"));
      }
      proven = client.getChannel();
      super.channelActive(client);
    }).sync();
  }

  private static boolean connectionEnded(Throwable error) {
    for (Throwable cause = error; cause != null; cause = cause.getCause()) {
      if (cause instanceof IOException) {
        return true;
      }
    }
    return false;
  }

  /** Spark's handler sends its first message here, which must not happen before authentication. */
  @Override
  public void channelActive(TransportClient client) {
    Channel channel = client.getChannel();
    channel.pipeline().addFirst(Limit.NAME, new Limit(() -> proven == channel));
  }

  @Override
  public void channelInactive(TransportClient client) {
    if (proven == client.getChannel()) {
      super.channelInactive(client);
    }
  }

  @Override
  public void receive(TransportClient client, ByteBuffer message, RpcResponseCallback callback) {
    if (proven == client.getChannel()) {
      super.receive(client, message, callback);
    } else {
      LOG.warn("Closed a connection of the streaming shuffle to {}: it sent a message before it proved that it knows "
          + "the secret of this session.", client.getChannel().remoteAddress());
      client.getChannel().close();
    }
  }

  @Override
  public void exceptionCaught(Throwable cause, TransportClient client) {
    if (proven == client.getChannel()) {
      super.exceptionCaught(cause, client);
    } else {
      LOG.warn("Closed a connection of the streaming shuffle to {} before its proof: {}",
          client.getChannel().remoteAddress(), cause.toString());
      client.getChannel().close();
    }
  }
}
