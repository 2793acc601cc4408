/** Runs the C program `unmapped` in a virtual machine, which turns faults into exceptions. */
public final class Unmapped {
    private static int depth;

    private static native int run(String face);

    private static int length(int[] array) {
        return array.length;
    }

    private static void recurse() {
        depth++;
        recurse();
    }

    /** Runs often enough that the compiled code relies on the fault instead of a null check. */
    private static void fault() {
        int[] array = new int[3];
        for (int i = 0; i < 50_000; i++) {
            if (length(array) != 3) {
                throw new AssertionError("length");
            }
        }
        int caught = 0;
        for (int i = 0; i < 100; i++) {
            try {
                length(null);
            } catch (NullPointerException expected) {
                caught++;
            }
        }
        try {
            recurse();
        } catch (StackOverflowError expected) {
            caught++;
        }
        if (caught != 101) {
            throw new AssertionError(caught + " exceptions");
        }
    }

    public static void main(String[] args) {
        fault();
        System.load(args[0]);
        int code = run(args[1]);
        fault();
        System.exit(code);
    }
}
