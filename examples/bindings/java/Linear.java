import com.sun.jna.Memory;
import com.sun.jna.Pointer;
import com.sun.jna.ptr.IntByReference;
import com.sun.jna.ptr.PointerByReference;
import java.util.Map;

/**
 * A linear model learns y = 3x + 1 in fp16 with dynamic loss scaling. It needs JNA only:
 *
 * <pre>
 * javac -cp jna.jar -d classes Semitone.java Linear.java
 * java -cp jna.jar:classes -Djna.library.path=DIR/lib Linear
 * </pre>
 */
public final class Linear {
  private Linear() {}

  private static long tensor(float[] data, long... sizes) {
    PointerByReference made = new PointerByReference();
    Semitone.check(Semitone.C.semitone_tensor_create(data, 4L * data.length, Semitone.FLOAT32, sizes, sizes.length, made));
    return Semitone.address(made.getValue());
  }

  /** Calls an operator of LibTorch with one result. A Long is a tensor, a Double a number. */
  private static long call(String op, Object... arguments) {
    Memory values = new Memory(24L * Math.max(1, arguments.length));  // of SemitoneValue: kind, count, value
    values.clear();
    for (int i = 0; i < arguments.length; ++i) {
      values.setInt(24L * i, arguments[i] instanceof Long ? 1 : 3);
      if (arguments[i] instanceof Long) {
        values.setLong(24L * i + 16, (Long) arguments[i]);
      } else {
        values.setDouble(24L * i + 16, (Double) arguments[i]);
      }
    }
    PointerByReference result = new PointerByReference();
    Semitone.check(Semitone.C.semitone_call(op, values, arguments.length, result, 1, null));
    return Semitone.address(result.getValue());
  }

  private static float item(long tensor) {
    float[] data = new float[1];
    Semitone.check(Semitone.C.semitone_tensor_read(new Pointer(tensor), data, 4));
    return data[0];
  }

  private static void stepOfSgd(long[] parameters) {
    IntByReference before = new IntByReference();
    Semitone.check(Semitone.C.semitone_set_grad_enabled(0, before));
    for (long parameter : parameters) {
      PointerByReference grad = new PointerByReference();
      Semitone.check(Semitone.C.semitone_tensor_grad(new Pointer(parameter), grad));
      Semitone.destroyTensor(call("aten::add_.Tensor", parameter, Semitone.address(grad.getValue()), -0.5));
      Semitone.destroyTensor(Semitone.address(grad.getValue()));
    }
    Semitone.check(Semitone.C.semitone_set_grad_enabled(before.getValue(), null));
  }

  public static void main(String[] arguments) {
    float[] x = new float[64];
    float[] y = new float[64];
    for (int i = 0; i < 64; ++i) {
      x[i] = i / 64f;
      y[i] = 3 * x[i] + 1;
    }
    long input = tensor(x, 64, 1);
    long target = tensor(y, 64, 1);
    long[] parameters = {tensor(new float[] {0}, 1, 1), tensor(new float[] {0}, 1)};
    for (long parameter : parameters) {
      Semitone.check(Semitone.C.semitone_tensor_set_requires_grad(new Pointer(parameter), 1));
    }

    int skipped = 0;
    double scale;
    try (Semitone.Policy policy = new Semitone.Policy("semitone", "cpu", Semitone.FLOAT16).keepFp32("softmax");
        Semitone.Scaler scaler = new Semitone.Scaler("torch", Map.of("init_scale", 65536.0))) {
      for (int step = 0; step < 300; ++step) {
        for (long parameter : parameters) {
          Semitone.check(Semitone.C.semitone_tensor_set_grad(new Pointer(parameter), null));
        }
        long output;
        long loss;
        try (Semitone.Region region = policy.enter()) {
          output = call("aten::linear", input, parameters[0], parameters[1]);
          loss = call("aten::mse_loss", output, target);
        }
        long scaled = scaler.scale(loss);
        Semitone.check(Semitone.C.semitone_tensor_backward(new Pointer(scaled)));
        if (scaler.unscale(parameters)) {
          ++skipped;
        } else {
          stepOfSgd(parameters);
        }
        scaler.update();
        for (long made : new long[] {output, loss, scaled}) Semitone.destroyTensor(made);
      }
      scale = scaler.getScale();
    }
    float slope = item(parameters[0]);
    float offset = item(parameters[1]);
    System.out.printf("y = %.2f x + %.2f, %d steps skipped, the scale is %.0f%n", slope, offset, skipped, scale);
    for (long made : new long[] {input, target, parameters[0], parameters[1]}) Semitone.destroyTensor(made);
    try {
      call("aten::no_such_operator");
      System.exit(1);
    } catch (Semitone.SemitoneException error) {
      if (error.status != 1 || !error.getMessage().contains("expected an operator of LibTorch")) throw error;
    }
    if (Math.abs(slope - 3) > 0.1 || Math.abs(offset - 1) > 0.1 || skipped == 0) System.exit(1);
  }
}
