package penstock.shuffle;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.util.Arrays;

import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;

/**
 * Both ends prove that they know the secret, which is never sent. The reader sends a nonce; the writer answers with its
 * own nonce and a keyed hash of both; the reader answers with another keyed hash of both.
 */
final class Handshake {
  static final int NONCE = 32;
  static final int PROOF = 32;
  private static final byte[] GREETING = "penstock shuffle 1\n".getBytes(StandardCharsets.US_ASCII);

  private final byte[] secret;
  private final SecureRandom random = new SecureRandom();

  Handshake(byte[] secret) {
    this.secret = secret.clone();
  }

  static byte[] fromHex(String text) {
    return java.util.HexFormat.of().parseHex(text);
  }

  byte[] nonce() {
    byte[] made = new byte[NONCE];
    random.nextBytes(made);
    return made;
  }

  byte[] proof(String side, byte[] reader, byte[] writer) {
    try {
      Mac mac = Mac.getInstance("HmacSHA256");
      mac.init(new SecretKeySpec(secret, "HmacSHA256"));
      mac.update(GREETING);
      mac.update(side.getBytes(StandardCharsets.US_ASCII));
      mac.update(reader);
      mac.update(writer);
      return mac.doFinal();
    } catch (GeneralSecurityException error) {
      throw new IllegalStateException(error);
    }
  }

  /** The reader's first message. */
  static ByteBuffer hello(byte[] nonce) {
    return ByteBuffer.allocate(GREETING.length + NONCE).put(GREETING).put(nonce).flip();
  }

  /** Whether the writer's answer proves that it knows the secret. */
  boolean fromWriter(byte[] mine, byte[] answer) {
    if (answer.length != NONCE + PROOF) {
      return false;
    }
    byte[] theirs = Arrays.copyOf(answer, NONCE);
    byte[] proof = Arrays.copyOfRange(answer, NONCE, NONCE + PROOF);
    return MessageDigest.isEqual(proof, proof("writer", mine, theirs));
  }

  /** The writer's end of one connection. Used only by the connection's event loop. */
  final class Session {
    volatile boolean proven;
    private byte[] reader;
    private byte[] writer;

    /** The answer to the reader's next message; null if the connection must be refused. */
    byte[] answer(byte[] message) {
      if (reader == null) {
        if (message.length != GREETING.length + NONCE
            || !Arrays.equals(message, 0, GREETING.length, GREETING, 0, GREETING.length)) {
          return null;
        }
        reader = Arrays.copyOfRange(message, GREETING.length, message.length);
        writer = nonce();
        return ByteBuffer.allocate(NONCE + PROOF).put(writer).put(proof("writer", reader, writer)).array();
      }
      if (!MessageDigest.isEqual(message, proof("reader", reader, writer))) {
        return null;
      }
      proven = true;
      return new byte[0];
    }
  }
}
