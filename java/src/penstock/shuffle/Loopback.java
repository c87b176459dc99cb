package penstock.shuffle;

import java.lang.reflect.Field;
import java.net.InetAddress;

import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Spark's streaming shuffle listens on all interfaces, and no setting changes that. This class makes "all interfaces"
 * mean 127.0.0.1 for sockets that this JVM opens from now on. Spark starts its JVMs with java.net open to reflection.
 */
final class Loopback {
  private static final Logger LOG = LoggerFactory.getLogger(Loopback.class);

  private Loopback() {}

  static void listenThereOnly() {
    try {
      Field implementation = InetAddress.class.getDeclaredField("impl");
      implementation.setAccessible(true);
      Object impl = implementation.get(null);
      Field any = impl.getClass().getDeclaredField("anyLocalAddress");
      any.setAccessible(true);
      synchronized (impl) {
        any.set(impl, InetAddress.getByAddress("localhost", new byte[] {127, 0, 0, 1}));
      }
    } catch (ReflectiveOperationException | java.net.UnknownHostException | RuntimeException error) {
      LOG.warn("The streaming shuffle listens on all interfaces: {}", error.toString());
    }
  }
}
