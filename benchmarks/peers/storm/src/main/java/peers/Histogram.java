package peers;

import java.util.Arrays;
import java.util.Locale;
import java.util.Queue;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

/** Log-linear histogram of nanoseconds, 64 steps per power of two (error below 1.6 %); one writer. */
final class Histogram {
    private final long[] buckets = new long[64 * 64];

    void record(long nanos) {
        long v = Math.max(nanos, 0) + 64; // the offset keeps small values linear
        int shift = 57 - Long.numberOfLeadingZeros(v); // leaves v >>> shift in 64..127
        buckets[shift * 64 + (int) (v >>> shift) - 64]++;
    }

    /** The given quantile of several histograms taken together, in milliseconds. */
    static double quantileMs(Queue<Histogram> parts, double q) {
        long total = parts.stream().flatMapToLong(h -> Arrays.stream(h.buckets)).sum();
        long seen = 0;
        for (int i = 0; i < 64 * 64 && total > 0; i++) {
            for (Histogram h : parts) {
                seen += h.buckets[i];
            }
            if (seen >= q * total) {
                return ((i % 64 + 64L << i / 64) - 64) / 1e6;
            }
        }
        return 0;
    }

    static String json(Queue<Histogram> parts) {
        return String.format(Locale.ROOT, "{\"p50\":%.3f,\"p99\":%.3f}",
                quantileMs(parts, 0.50), quantileMs(parts, 0.99));
    }

    /** The 1st to the 99th percentile, in milliseconds, as a JSON array: enough to draw the distribution. */
    static String percentiles(Queue<Histogram> parts) {
        return IntStream.rangeClosed(1, 99)
                .mapToObj(p -> String.format(Locale.ROOT, "%.3f", quantileMs(parts, p / 100.0)))
                .collect(Collectors.joining(",", "[", "]"));
    }
}
