// A streamed answer with a Node stub. Usage: node examples/node/stream.mjs ["question"]
// Needs `npm install` in this folder and the descriptor image that `make protos` writes.
import { existsSync, readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

// The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
const record = ".sluice/run/envoy.json";
const running = existsSync(record) ? JSON.parse(readFileSync(record, "utf8")).ports.http : "localhost:8080";
const address = process.env.SLUICE_ENDPOINT ?? running;
const key = readFileSync(process.env.SLUICE_KEY_FILE ?? ".sluice/api-key", "utf8").trim();
const image = new URL("../../protos/build/sluice.binpb", import.meta.url);
const question = process.argv[2] ?? "What is the capital of France?";

const definition = protoLoader.loadFileDescriptorSetFromBuffer(readFileSync(image), {
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
  defaults: true,
});
const { SchedulerService } = grpc.loadPackageDefinition(definition).sluice.scheduler.v1;
const client = new SchedulerService(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${key}`);
const stream = client.Generate(
  { prompt: question, sampling: { max_tokens: 64, temperature: 0 } },
  metadata,
  { deadline: Date.now() + 60_000 },
);
stream.on("data", (message) => {
  if (message.event === "delta") process.stdout.write(message.delta.text);
  if (message.event === "finished") {
    const { usage, instance, simulated } = message.finished;
    const label = simulated ? " (SIMULATED)" : "";
    console.log(`\n[${usage.completion_tokens} tokens on ${instance}${label}]`);
  }
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("end", () => client.close());
