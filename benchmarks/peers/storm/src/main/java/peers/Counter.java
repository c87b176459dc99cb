package peers;

import java.util.Queue;
import java.util.concurrent.atomic.AtomicLongArray;

/** A counter with one writer (its task), alone on its cache lines: slot 16 of a 32-slot array. */
final class Counter {
    private final AtomicLongArray cells = new AtomicLongArray(32);

    void increment() {
        cells.setRelease(16, cells.getPlain(16) + 1); // single writer: no atomic add needed
    }

    static long total(Queue<Counter> counters) {
        return counters.stream().mapToLong(c -> c.cells.getAcquire(16)).sum();
    }
}
