"""A worker pool: three workers share the jobs of one mailbox, urgent ones first, and a job that fails comes again.

Beside a running service (`mediator serve`)::

    python examples/worker_pool.py [nats://HOST:PORT]

Each job is leased to one worker at a time: acknowledged when its block succeeds, given back when the block raises, and
given to somebody else when the worker dies and its lease of 30 seconds ends. In earnest each worker is a process of its
own, on any machine, and they come and go as they like: whoever consumes with the same group is in the pool.
"""

import asyncio
import sys

from mediator.client import Client, Mailbox, Outgoing

URL = sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"
JOBS = ["resize cat.png", "resize broken.png", "resize dog.png", "resize owl.png"]


async def work(name: str, jobs: Mailbox, done: asyncio.Queue[str]) -> None:
    """Take jobs for as long as the program runs."""
    async for job in jobs.consume(group="resizers", lease=30):
        try:
            async with job:
                if "broken" in job.text and job.deliveries == 1:
                    raise OSError("the disk of this worker is full")
        except OSError as error:
            print(f"{name} failed at {job.text!r}: {error}")
        else:
            print(f"{name} did {job.text!r}" + (" in a second attempt" if job.deliveries > 1 else ""))
            done.put_nowait(job.text)


async def main() -> None:
    """Send jobs, and work on them until all are done."""
    async with Client(URL) as client:
        # until_ack: what the group has acknowledged is removed. It is gone by itself after an hour.
        jobs = await client.create(retention="until_ack", ttl=3600)
        await jobs.send_many([Outgoing(job) for job in JOBS])
        await jobs.send("resize logo.png", priority="urgent")  # overtakes those that wait

        done: asyncio.Queue[str] = asyncio.Queue()
        workers = [asyncio.create_task(work(f"worker {number}", jobs, done)) for number in (1, 2, 3)]
        for _ in range(len(JOBS) + 1):
            await done.get()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        print("left:", len(await jobs.query()))


if __name__ == "__main__":
    asyncio.run(main())
