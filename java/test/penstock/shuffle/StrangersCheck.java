package penstock.shuffle;

import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicInteger;

import io.netty.buffer.ByteBufUtil;
import io.netty.buffer.CompositeByteBuf;
import io.netty.buffer.Unpooled;

import org.apache.spark.TaskContext;
import org.apache.spark.TaskContext$;
import org.apache.spark.network.TransportContext;
import org.apache.spark.network.client.RpcResponseCallback;
import org.apache.spark.network.client.TransportClient;
import org.apache.spark.network.client.TransportClientFactory;
import org.apache.spark.network.server.RpcHandler;
import org.apache.spark.network.server.StreamManager;
import org.apache.spark.network.server.TransportServer;
import org.apache.spark.network.shuffle.streaming.StreamingShuffleMessage;
import org.apache.spark.network.shuffle.streaming.TerminationControlMessage;
import org.apache.spark.network.util.MapConfigProvider;
import org.apache.spark.network.util.TransportConf;
import org.apache.spark.util.ErrorNotifier;

import scala.runtime.AbstractFunction2;
import scala.runtime.BoxedUnit;

/** Checks a reader of the streaming shuffle if another process listens in place of a writer. Run by test_ports.py. */
public final class StrangersCheck {
  private static final Handshake HANDSHAKE = new Handshake(new byte[32]);
  private static final long[] PAUSES_MS = {1, 1, 1};
  private static final TransportConf CONF = new TransportConf("shuffle", MapConfigProvider.EMPTY);
  private static final TaskContext CONTEXT = TaskContext$.MODULE$.empty();

  private final LinkedBlockingQueue<StreamingShuffleMessage> queue = new LinkedBlockingQueue<>();
  private final ErrorNotifier errors = new ErrorNotifier();
  private final GuardedClientHandler handler = new GuardedClientHandler(0, 0, queue, 1, 100_000, CONTEXT, errors);

  private interface Stranger {
    void serve(DataInputStream in, DataOutputStream out) throws IOException;
  }

  private interface Check {
    void run() throws Exception;
  }

  public static void main(String[] arguments) {
    check("a message before the proof is not handled", () -> new StrangersCheck().refuses(4, (in, out) -> {
      out.write(oneWay(termination()));
      in.readAllBytes();
    }));
    check("garbage before the proof is no error of the shuffle", () -> new StrangersCheck().refuses(4, (in, out) -> {
      out.write(oneWay("garbage".getBytes()));
      in.readAllBytes();
    }));
    check("a frame of no known kind is no error of the shuffle", () -> new StrangersCheck().refuses(1, (in, out) -> {
      in.readFully(new byte[8 + 1]); // an answer: what comes before the question only closes the connection
      out.write(new byte[] {0, 0, 0, 0, 0, 0, 0, 10, (byte) 0xff, 0});
      in.readAllBytes();
    }));
    check("a wrong proof is refused at once", () -> new StrangersCheck().refuses(1, (in, out) -> {
      in.readFully(new byte[8 + 1]);
      long request = in.readLong();
      out.write(ByteBuffer.allocate(8 + 1 + 8 + 4 + 64).putLong(8 + 1 + 8 + 4 + 64).put((byte) 4).putLong(request)
          .putInt(64).array());
      in.readAllBytes();
    }));
    check("at most 64 KB are read before the proof", StrangersCheck::readsLittle);
    check("a connection that the writer closes before the proof is tried again", StrangersCheck::triesAgain);
    System.exit(0);
  }

  private static void check(String name, Check check) {
    try {
      check.run();
      System.out.println("ok " + name);
    } catch (Throwable error) {
      System.out.println("FAILED " + name + ": " + error);
    }
  }

  private void refuses(int connections, Stranger stranger) throws Exception {
    AtomicInteger accepted = new AtomicInteger();
    try (ServerSocket server = new ServerSocket(0, 50, InetAddress.getLoopbackAddress())) {
      Thread thread = new Thread(() -> serve(server, accepted, stranger));
      thread.start();
      boolean connected = true;
      try (TransportClientFactory factory = new TransportContext(CONF, handler).createClientFactory()) {
        handler.connect(factory, HANDSHAKE, "127.0.0.1", server.getLocalPort(), PAUSES_MS);
      } catch (RuntimeException refused) {
        connected = false;
      }
      expect(!connected, "it connected");
    }
    untouched();
    expect(accepted.get() == connections, accepted.get() + " connections");
  }

  private void untouched() {
    expect(queue.isEmpty(), "a message was handled: " + queue.peek());
    expect(errors.getError().isEmpty(), "an error of the shuffle: " + errors.getError());
  }

  private static void serve(ServerSocket server, AtomicInteger accepted, Stranger stranger) {
    while (!server.isClosed()) {
      try (Socket socket = server.accept()) {
        accepted.incrementAndGet();
        socket.setSoTimeout(5_000);
        stranger.serve(new DataInputStream(socket.getInputStream()), new DataOutputStream(socket.getOutputStream()));
      } catch (IOException ended) {
        // the reader closed it
      }
    }
  }

  /** A frame that announces 1 GB: the reader closes the connection long before it has received it. */
  private static void readsLittle() throws Exception {
    AtomicInteger megabytes = new AtomicInteger();
    new StrangersCheck().refuses(4, (in, out) -> {
      out.write(ByteBuffer.allocate(9).putLong(1 << 30).put((byte) 9).array());
      for (int sent = 0; sent < 64; sent++) {
        out.write(new byte[1 << 20]);
        megabytes.incrementAndGet();
      }
    });
    expect(megabytes.get() < 4 * 32, megabytes.get() + " MB were taken");
  }

  /** The writer closes the first two connections, as it does if there are too many unauthenticated ones. */
  private static void triesAgain() throws Exception {
    StrangersCheck reader = new StrangersCheck();
    ErrorNotifier errors = new ErrorNotifier();
    GuardedServerHandler writer = new GuardedServerHandler(
        HANDSHAKE, new AbstractFunction2<Object, Object, BoxedUnit>() {
          @Override
          public BoxedUnit apply(Object id, Object number) {
            return BoxedUnit.UNIT;
          }
        }, 1, 1, CONTEXT, errors);
    AtomicInteger connections = new AtomicInteger();
    RpcHandler evicting = new RpcHandler() {
      @Override
      public void channelActive(TransportClient client) {
        writer.channelActive(client);
      }

      @Override
      public void receive(TransportClient client, ByteBuffer message, RpcResponseCallback callback) {
        if (message.remaining() > Handshake.NONCE && connections.incrementAndGet() <= 2) {
          client.getChannel().close();
        } else {
          writer.receive(client, message, callback);
        }
      }

      @Override
      public StreamManager getStreamManager() {
        return writer.getStreamManager();
      }
    };
    try (TransportContext context = new TransportContext(CONF, evicting);
        TransportServer server = context.createServer("127.0.0.1", 0, List.of());
        TransportClientFactory factory = new TransportContext(CONF, reader.handler).createClientFactory()) {
      TransportClient client =
          reader.handler.connect(factory, HANDSHAKE, "127.0.0.1", server.getPort(), PAUSES_MS);
      expect(client.isActive(), "the connection is closed");
      reader.untouched();
      expect(connections.get() >= 3, connections.get() + " connections");
    }
  }

  private static byte[] termination() {
    CompositeByteBuf encoded = Unpooled.compositeBuffer();
    new TerminationControlMessage(0, 1).encode(encoded);
    return ByteBufUtil.getBytes(encoded);
  }

  private static byte[] oneWay(byte[] message) {
    int size = 8 + 1 + 4 + message.length;
    return ByteBuffer.allocate(size).putLong(size).put((byte) 9).putInt(message.length).put(message).array();
  }

  private static void expect(boolean holds, String what) {
    if (!holds) {
      throw new AssertionError(what);
    }
  }
}
