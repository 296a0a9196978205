// A model of TorchSharp, trained in fp16 with dynamic loss scaling.
//
// UNTESTED: the package TorchSharp was not available where Semitone is built, so this program has not
// been compiled. The LibTorch that TorchSharp loads must have the release that Semitone was built with.
using System;
using System.Linq;
using Semitone;
using TorchSharp;
using static TorchSharp.torch;

static class Program
{
    static void Main()
    {
        var net = nn.Sequential(("first", nn.Linear(784, 128)), ("relu", nn.ReLU()), ("second", nn.Linear(128, 10)));
        var optimizer = optim.SGD(net.parameters(), 0.1);
        var handles = net.parameters().Select(parameter => parameter.Handle).ToArray();
        var images = rand(64, 784);
        var labels = randint(10, new long[] { 64 }, int64);

        using (var policy = new Policy("semitone", "cpu", Dtype.Float16))
        using (var scaler = new Scaler("torch"))
        {
            for (var step = 0; step < 10; ++step)
            {
                optimizer.zero_grad();
                Tensor loss;
                using (policy.Enter())
                {
                    loss = nn.functional.cross_entropy(net.forward(images), labels);
                }
                // The result is a new at::Tensor, which TorchSharp deletes.
                using (var scaled = Tensor.UnsafeCreateTensor(scaler.Scale(loss.Handle)))
                {
                    scaled.backward();
                }
                if (!scaler.Unscale(handles)) optimizer.step();
                scaler.Update();
                Console.WriteLine($"loss {loss.item<float>()}, scale {scaler.GetScale()}");
            }
        }
        GC.KeepAlive(net);
    }
}
