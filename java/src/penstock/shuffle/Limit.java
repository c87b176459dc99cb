package penstock.shuffle;

import java.util.function.BooleanSupplier;

import io.netty.buffer.ByteBuf;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.util.ReferenceCountUtil;

/** Closes a connection that sends too much before it is authenticated: a frame may announce 2 GB, all to be buffered. */
final class Limit extends ChannelInboundHandlerAdapter {
  static final String NAME = "penstock-limit";
  /** Bytes read from a connection before it is authenticated, including a TLS handshake. */
  static final long MOST_BYTES = 64 * 1024;

  private final BooleanSupplier proven;
  private long read;

  Limit(BooleanSupplier proven) {
    this.proven = proven;
  }

  @Override
  public void channelRead(ChannelHandlerContext context, Object message) {
    if (proven.getAsBoolean()) {
      context.fireChannelRead(message);
      context.pipeline().remove(this);
      return;
    }
    read += message instanceof ByteBuf ? ((ByteBuf) message).readableBytes() : 0;
    if (read > MOST_BYTES) {
      ReferenceCountUtil.release(message);
      context.close();
    } else {
      context.fireChannelRead(message);
    }
  }
}
