import com.sun.jna.Library;
import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import com.sun.jna.ptr.DoubleByReference;
import com.sun.jna.ptr.IntByReference;
import com.sun.jna.ptr.PointerByReference;
import java.lang.ref.Reference;
import java.nio.charset.StandardCharsets;
import java.util.Map;

/**
 * Semitone for Java: policies, regions, loss scaling and master weights of libsemitone_c, called through
 * JNA. Tensors are the addresses of C++'s at::Tensor: {@code tensor.address()} of javacpp-presets. A
 * result is a new at::Tensor that belongs to the caller: free it with {@link #destroyTensor}.
 */
public final class Semitone {
  public static final int FLOAT16 = 5;
  public static final int FLOAT32 = 6;
  public static final int BFLOAT16 = 15;

  private Semitone() {}

  /** The functions of semitone/c/semitone.h. size_t is long. */
  interface Functions extends Library {
    String semitone_last_error();
    int semitone_tensor_create(float[] data, long bytes, int dtype, long[] sizes, long dims, PointerByReference tensor);
    int semitone_tensor_destroy(Pointer tensor);
    int semitone_tensor_read(Pointer tensor, float[] data, long bytes);
    int semitone_tensor_set_requires_grad(Pointer tensor, int requiresGrad);
    int semitone_tensor_grad(Pointer tensor, PointerByReference grad);
    int semitone_tensor_set_grad(Pointer tensor, Pointer grad);
    int semitone_tensor_backward(Pointer tensor);
    int semitone_set_grad_enabled(int enabled, IntByReference before);
    int semitone_call(String op, Pointer arguments, long argumentCount, PointerByReference result, long capacity, Pointer count);
    int semitone_policy_create(String preset, String device, int dtype, PointerByReference policy);
    int semitone_policy_destroy(Pointer policy);
    int semitone_policy_set(Pointer policy, String op, int action);
    int semitone_region_enter(Pointer policy, PointerByReference region);
    int semitone_region_exit(Pointer region);
    int semitone_scaler_create(String preset, Pointer options, long optionCount, PointerByReference scaler);
    int semitone_scaler_destroy(Pointer scaler);
    int semitone_scaler_scale(Pointer scaler, Pointer loss, PointerByReference scaled);
    int semitone_scaler_unscale(Pointer scaler, Pointer[] parameters, long count, IntByReference foundInf);
    int semitone_scaler_update(Pointer scaler);
    int semitone_scaler_get_scale(Pointer scaler, DoubleByReference scale);
    int semitone_masters_create(Pointer[] parameters, long count, PointerByReference masters);
    int semitone_masters_destroy(Pointer masters);
    int semitone_masters_list(Pointer masters, Pointer[] tensors, long count);
    int semitone_masters_take_gradients(Pointer masters);
    int semitone_masters_clear_gradients(Pointer masters);
    int semitone_masters_write_model(Pointer masters);
  }

  static final Functions C =
      Native.load("semitone_c", Functions.class, Map.of(Library.OPTION_STRING_ENCODING, "UTF-8"));

  /** An error of the library. */
  public static final class SemitoneException extends RuntimeException {
    private static final long serialVersionUID = 1;
    public final int status;

    SemitoneException(int status, String message) {
      super(message);
      this.status = status;
    }
  }

  static void check(int status) {
    if (status != 0) throw new SemitoneException(status, C.semitone_last_error());
  }

  static Pointer[] pointers(long[] addresses) {
    Pointer[] pointers = new Pointer[addresses.length];
    for (int i = 0; i < addresses.length; ++i) pointers[i] = new Pointer(addresses[i]);
    return pointers;
  }

  static long address(Pointer pointer) {
    return Pointer.nativeValue(pointer);
  }

  /** Frees an at::Tensor that a function returned. */
  public static void destroyTensor(long tensor) {
    check(C.semitone_tensor_destroy(new Pointer(tensor)));
  }

  /** Which operators run in 16 bits. */
  public static final class Policy implements AutoCloseable {
    private final PointerByReference handle = new PointerByReference();

    public Policy(String preset, String device, int dtype) {
      check(C.semitone_policy_create(preset, device, dtype, handle));
    }

    public Policy keepFp32(String op) {
      check(C.semitone_policy_set(handle.getValue(), op, 1));
      return this;
    }

    /**
     * Until the region is closed, operators of this thread run under the policy. Close regions in the
     * reverse order, on the thread that entered them.
     */
    public Region enter() {
      PointerByReference region = new PointerByReference();
      check(C.semitone_region_enter(handle.getValue(), region));
      return new Region(region.getValue());
    }

    @Override
    public void close() {
      check(C.semitone_policy_destroy(handle.getValue()));
      handle.setValue(null);
    }
  }

  /** See {@link Policy#enter}. */
  public static final class Region implements AutoCloseable {
    private Pointer handle;

    Region(Pointer handle) {
      this.handle = handle;
    }

    @Override
    public void close() {
      if (handle == null) return;
      check(C.semitone_region_exit(handle));
      handle = null;
    }
  }

  /** A loss scale. */
  public static final class Scaler implements AutoCloseable {
    private final PointerByReference handle = new PointerByReference();

    public Scaler(String preset, Map<String, Double> options) {
      Memory list = new Memory(16L * Math.max(1, options.size()));
      Memory[] names = new Memory[options.size()];
      int count = 0;
      for (Map.Entry<String, Double> option : options.entrySet()) {
        byte[] name = option.getKey().getBytes(StandardCharsets.UTF_8);
        names[count] = new Memory(name.length + 1L);
        names[count].clear();
        names[count].write(0, name, 0, name.length);
        list.setPointer(16L * count, names[count]);
        list.setDouble(16L * count + 8, option.getValue());
        ++count;
      }
      try {
        check(C.semitone_scaler_create(preset, list, count, handle));
      } finally {
        Reference.reachabilityFence(names);  // the list has their addresses only
      }
    }

    /** Returns loss * scale: a new at::Tensor. */
    public long scale(long loss) {
      PointerByReference scaled = new PointerByReference();
      check(C.semitone_scaler_scale(handle.getValue(), new Pointer(loss), scaled));
      return address(scaled.getValue());
    }

    /** Unscales the gradients of parameters. Returns whether the step has to be skipped. */
    public boolean unscale(long[] parameters) {
      IntByReference foundInf = new IntByReference();
      check(C.semitone_scaler_unscale(handle.getValue(), pointers(parameters), parameters.length, foundInf));
      return foundInf.getValue() != 0;
    }

    public void update() {
      check(C.semitone_scaler_update(handle.getValue()));
    }

    public double getScale() {
      DoubleByReference scale = new DoubleByReference();
      check(C.semitone_scaler_get_scale(handle.getValue(), scale));
      return scale.getValue();
    }

    @Override
    public void close() {
      check(C.semitone_scaler_destroy(handle.getValue()));
      handle.setValue(null);
    }
  }

  /** fp32 masters of 16-bit parameters. */
  public static final class Masters implements AutoCloseable {
    private final PointerByReference handle = new PointerByReference();
    private final int count;

    public Masters(long[] parameters) {
      count = parameters.length;
      check(C.semitone_masters_create(pointers(parameters), count, handle));
    }

    /** Returns the tensors that the optimizer is to update: new at::Tensors. */
    public long[] list() {
      Pointer[] tensors = new Pointer[count];
      check(C.semitone_masters_list(handle.getValue(), tensors, count));
      long[] addresses = new long[count];
      for (int i = 0; i < count; ++i) addresses[i] = address(tensors[i]);
      return addresses;
    }

    public void takeGradients() {
      check(C.semitone_masters_take_gradients(handle.getValue()));
    }

    public void clearGradients() {
      check(C.semitone_masters_clear_gradients(handle.getValue()));
    }

    public void writeModel() {
      check(C.semitone_masters_write_model(handle.getValue()));
    }

    @Override
    public void close() {
      check(C.semitone_masters_destroy(handle.getValue()));
      handle.setValue(null);
    }
  }
}
