// How a wallet is made with Credo 0.6.
import { askar } from "@openwallet-foundation/askar-nodejs"; // Before Credo's own part of it, which looks for it.
import { AskarModule } from "@credo-ts/askar";
import { Agent, ConsoleLogger, LogLevel } from "@credo-ts/core";
import { agentDependencies } from "@credo-ts/node";
import {
  DidCommHttpOutboundTransport,
  DidCommMediatorPickupStrategy,
  DidCommModule,
  DidCommWsOutboundTransport,
} from "@credo-ts/didcomm";

export { ConsoleLogger as Logger, LogLevel, DidCommMediatorPickupStrategy as strategies };
export const MESSAGE = "DidCommBasicMessageStateChanged";
export const didcomm = (agent) => agent.didcomm;

export function make({ label, store: { path, id, key }, mediationRecipient, connections, logger }) {
  return new Agent({
    config: { label, logger },
    dependencies: agentDependencies,
    modules: {
      askar: new AskarModule({
        askar,
        store: { id, key, keyDerivationMethod: "raw", database: { type: "sqlite", config: { path } } },
      }),
      didcomm: new DidCommModule({
        transports: { outbound: [new DidCommWsOutboundTransport(), new DidCommHttpOutboundTransport()] },
        mediationRecipient,
        connections,
      }),
    },
  });
}
