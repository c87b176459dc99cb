package penstock.shuffle;

import java.nio.ByteBuffer;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.TimeUnit;

import io.netty.channel.Channel;
import io.netty.util.AttributeKey;

import org.apache.spark.TaskContext;
import org.apache.spark.network.client.RpcResponseCallback;
import org.apache.spark.network.client.TransportClient;
import org.apache.spark.shuffle.streaming.StreamingShuffleServerHandler;
import org.apache.spark.util.ErrorNotifier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

import scala.Function2;
import scala.runtime.BoxedUnit;

/**
 * The writer's end: passes messages to Spark's handler only after the connection is authenticated. Messages of other
 * processes, and the end of their connections, are not errors of the shuffle.
 */
final class GuardedServerHandler extends StreamingShuffleServerHandler {
  /** Seconds a connection may take to authenticate. */
  private static final int HANDSHAKE_SECONDS = 10;
  /** Unauthenticated connections at a time, in addition to the readers'. A further one closes the oldest. */
  private static final int MOST_STRANGERS = 64;
  private static final AttributeKey<Handshake.Session> SESSION = AttributeKey.valueOf("penstock.session");
  private static final Logger LOG = LoggerFactory.getLogger(GuardedServerHandler.class);

  private final Handshake handshake;
  private final int mostStrangers;
  private final ConcurrentLinkedDeque<Channel> strangers = new ConcurrentLinkedDeque<>();

  GuardedServerHandler(
      Handshake handshake, Function2<Object, Object, BoxedUnit> onTerminationAck,
      int shuffleId, int readers, TaskContext context, ErrorNotifier errors) {
    super(onTerminationAck, shuffleId, readers, context, errors);
    this.handshake = handshake;
    this.mostStrangers = MOST_STRANGERS + readers;
  }

  @Override
  public void channelActive(TransportClient client) {
    Channel channel = client.getChannel();
    Handshake.Session session = handshake.new Session();
    channel.attr(SESSION).set(session);
    channel.pipeline().addFirst(Limit.NAME, new Limit(() -> session.proven));
    strangers.addLast(channel);
    if (strangers.size() > mostStrangers) {
      Channel oldest = strangers.pollFirst();
      if (oldest != null) {
        oldest.close();
      }
    }
    channel.eventLoop().schedule(() -> {
      if (!session.proven) {
        channel.close();
      }
    }, HANDSHAKE_SECONDS, TimeUnit.SECONDS);
  }

  @Override
  public void channelInactive(TransportClient client) {
    strangers.remove(client.getChannel());
    super.channelInactive(client);
  }

  @Override
  public void receive(TransportClient client, ByteBuffer message, RpcResponseCallback callback) {
    Handshake.Session session = client.getChannel().attr(SESSION).get();
    if (session != null && session.proven) {
      super.receive(client, message, callback);
      return;
    }
    byte[] data = new byte[message.remaining()];
    message.get(data);
    byte[] answer = session == null ? null : session.answer(data);
    if (answer == null) {
      LOG.warn("Refused a connection to the streaming shuffle from {}: it does not know the secret of this session.",
          client.getChannel().remoteAddress());
      client.getChannel().close();
      return;
    }
    if (session.proven) {
      strangers.remove(client.getChannel());
    }
    callback.onSuccess(ByteBuffer.wrap(answer));
  }

  @Override
  public void exceptionCaught(Throwable cause, TransportClient client) {
    Handshake.Session session = client.getChannel().attr(SESSION).get();
    if (session != null && session.proven) {
      super.exceptionCaught(cause, client);
    } else {
      LOG.warn("Closed a connection to the streaming shuffle from {} before its proof: {}",
          client.getChannel().remoteAddress(), cause.toString());
      client.getChannel().close();
    }
  }
}
