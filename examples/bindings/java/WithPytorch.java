import java.lang.ref.Reference;
import java.util.Map;
import org.bytedeco.javacpp.Pointer;
import org.bytedeco.pytorch.LinearImpl;
import org.bytedeco.pytorch.SGD;
import org.bytedeco.pytorch.SGDOptions;
import org.bytedeco.pytorch.Tensor;
import org.bytedeco.pytorch.TensorVector;
import org.bytedeco.pytorch.global.torch;

/**
 * A layer of javacpp-presets' PyTorch, trained in fp16 with dynamic loss scaling.
 *
 * <p>UNTESTED: org.bytedeco:pytorch was not available where Semitone is built, so this program has not
 * been compiled. Its LibTorch must have the release that Semitone was built with.
 */
public final class WithPytorch {
  private WithPytorch() {}

  /** A Tensor at an address, which it does not free. */
  private static Tensor tensorAt(long where) {
    return new Tensor(new Pointer() {
      {
        this.address = where;
      }
    });
  }

  public static void main(String[] arguments) {
    LinearImpl layer = new LinearImpl(784, 10);
    TensorVector vector = layer.parameters();
    SGD optimizer = new SGD(vector, new SGDOptions(0.1));
    Tensor[] parameters = vector.get();
    long[] addresses = new long[parameters.length];
    for (int i = 0; i < parameters.length; ++i) addresses[i] = parameters[i].address();
    Tensor images = torch.rand(64, 784);
    Tensor labels = torch.randint(10, new long[] {64}).to(torch.ScalarType.Long);

    try (Semitone.Policy policy = new Semitone.Policy("semitone", "cpu", Semitone.FLOAT16);
        Semitone.Scaler scaler = new Semitone.Scaler("torch", Map.of())) {
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        Tensor loss;
        try (Semitone.Region region = policy.enter()) {
          loss = torch.cross_entropy_loss(layer.forward(images), labels);
        }
        long scaled = scaler.scale(loss.address());
        tensorAt(scaled).backward();
        Semitone.destroyTensor(scaled);
        if (!scaler.unscale(addresses)) optimizer.step();
        scaler.update();
        System.out.printf("loss %f, scale %f%n", loss.item_float(), scaler.getScale());
      }
    }
    // The C++ tensors are elements of the vector, and `addresses` does not keep them alive.
    Reference.reachabilityFence(vector);
    Reference.reachabilityFence(parameters);
  }
}
