/*
 * Measures the bandwidth of libfabric's tcp provider between two processes: one-sided writes (rma),
 * or messages into posted receives (msg).
 *
 *   fi_bw rma|msg OCTETS COUNT DEPTH PORT            runs the server, for one client
 *   fi_bw rma|msg OCTETS COUNT DEPTH PORT ADDRESS    runs the client, which prints one line:
 *                                                    octets, count, depth, GB/s,
 *                                                    million messages/s
 *
 * Up to DEPTH operations are outstanding, in a sliding window. The measured time ends when the
 * server has confirmed that all data have arrived.
 *
 * The program uses the provider in the fastest way that was found: it injects small operations (a
 * few percent faster), and requests one completion per quarter of the window (at least as fast as
 * one per operation). A window of 1024 instead of the provider's 256 for small operations had no
 * effect. Larger buffers had none either, because the provider writes each operation to the socket
 * separately unless the socket is full. TCP_NODELAY is on, which is the provider's default, and is
 * the same in all benchmarks here.
 */
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Size of the memory through which small messages cycle, as in the other benchmarks. */
#define WINDOW (256 * 1024)
/* Maximum number of completions per poll. */
#define POLLED 64
/* Time limit of the whole run, in seconds. */
#define LIMIT 35

/* The memory that the client may write to, which the server sends when it accepts. */
struct target {
	uint64_t address;
	uint64_t key;
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_eq *eq;
static struct fid_cq *tx_cq, *rx_cq;
static struct fid_ep *ep;
static struct target target;
static char *memory;
static size_t size, slots;
/* Maximum number of outstanding operations. */
static uint64_t depth;
/* Numbers of started operations, completed operations, received messages, and posted receives. */
static uint64_t sent, done, arrived, posted;
static int is_rma;

static void fail(const char *what, long error)
{
	fprintf(stderr, "fi_bw: %s: %s\n", what, fi_strerror(error < 0 ? (int)-error : (int)error));
	exit(1);
}

static void check(const char *what, long result)
{
	if (result < 0)
		fail(what, result);
}

static void timed_out(int signal)
{
	static const char text[] = "fi_bw: the time limit has expired\n";

	(void)signal;
	_exit(write(STDERR_FILENO, text, sizeof(text) - 1) > 0 ? 1 : 2);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/*
 * Polls completions, which also drives the endpoint. Returns the number of completed operations:
 * the context of a completion is the number of operations that it covers.
 */
static uint64_t completed(struct fid_cq *cq)
{
	struct fi_cq_entry entries[POLLED];
	struct fi_cq_err_entry error = {0};
	uint64_t sum = 0;
	ssize_t n = fi_cq_read(cq, entries, POLLED);

	if (n < 0 && n != -FI_EAGAIN) {
		fi_cq_readerr(cq, &error, 0);
		fail("an operation or a receive", error.err ? error.err : n);
	}
	for (ssize_t i = 0; i < n; i++)
		sum += (uintptr_t)entries[i].op_context;
	return sum;
}

static char *slot(uint64_t index)
{
	return memory + index % slots * size;
}

static void drive_receives(void)
{
	uint64_t n = completed(rx_cq);

	arrived += n;
	posted -= n;
	/* Post receives in batches, but before the peer runs out of them. */
	for (int run = posted <= depth / 2; run && posted < depth; posted++)
		check("fi_recv", fi_recv(ep, slot(posted), size, NULL, 0, (void *)1));
}

/*
 * Starts one operation. If `covered` is not 0, the operation creates a completion, which covers
 * `covered` operations. Returns 0 if the provider's queue is full.
 */
static int start(int write, size_t length, uint64_t covered, int inject)
{
	char *from = slot(sent);
	uint64_t flags = covered ? FI_COMPLETION : 0;
	void *context = (void *)(uintptr_t)covered;
	struct iovec part = {from, length};
	struct fi_rma_iov remote = {target.address + (uint64_t)(from - memory), length, target.key};
	struct fi_msg_rma rma = {&part, NULL, 1, 0, &remote, 1, context, 0};
	struct fi_msg msg = {&part, NULL, 1, 0, context, 0};
	long r;

	if (write)
		r = inject ? fi_inject_write(ep, from, length, 0, remote.addr, target.key)
			   : fi_writemsg(ep, &rma, flags);
	else
		r = inject ? fi_inject(ep, from, length, 0) : fi_sendmsg(ep, &msg, flags);
	if (r == -FI_EAGAIN)
		return 0;
	check("starting an operation", r);
	sent++;
	return 1;
}

/* Sends a last message to the peer, and waits until all operations are complete. */
static void notify_peer(void)
{
	for (int started = 0; !started || done < sent; done += completed(tx_cq))
		started = started || start(0, 1, 1, 0);
}

static void client(uint64_t count)
{
	int inject = size <= info->tx_attr->inject_size;
	uint64_t run = depth < 4 ? 1 : depth / 4, unsignalled = 0, awaited = arrived + 1;

	for (uint64_t i = 0; i < count;) {
		uint64_t covered = !inject && (unsignalled + 1 == run || i + 1 == count) ? unsignalled + 1 : 0;

		/* Injected operations have no completion; the provider reports when its window is full. */
		if (sent - done < depth && start(is_rma, size, covered, inject)) {
			unsignalled = covered ? 0 : unsignalled + 1;
			done += inject;
			i++;
		} else {
			done += completed(tx_cq);
		}
	}
	if (is_rma)
		notify_peer();
	while (arrived < awaited) {
		done += completed(tx_cq);
		drive_receives();
	}
}

static void server(uint64_t count)
{
	uint64_t awaited = arrived + (is_rma ? 1 : count);

	while (arrived < awaited)
		drive_receives();
	notify_peer();
}

static void await_event(uint32_t wanted, struct fi_eq_cm_entry *entry, size_t room)
{
	struct fi_eq_err_entry error = {.err = FI_EOTHER};
	uint32_t event = 0;
	ssize_t n = fi_eq_sread(eq, &event, entry, room, LIMIT * 1000, 0);

	if (n == -FI_EAVAIL)
		fi_eq_readerr(eq, &error, 0);
	if (n < 0 || event != wanted)
		fail("cannot connect", n == -FI_EAVAIL || n >= 0 ? error.err : n);
}

/* Opens the endpoint, and posts receives before the peer can send messages. */
static void open_endpoint(void)
{
	struct fi_cq_attr attributes = {.format = FI_CQ_FORMAT_CONTEXT, .size = 2 * depth + 64};
	size_t length = size > WINDOW ? size : WINDOW;
	struct fid_domain *domain;
	struct fid_mr *mr;

	check("fi_domain", fi_domain(fabric, info, &domain, NULL));
	check("fi_cq_open", fi_cq_open(domain, &attributes, &tx_cq, NULL));
	check("fi_cq_open", fi_cq_open(domain, &attributes, &rx_cq, NULL));
	check("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	check("fi_ep_bind", fi_ep_bind(ep, &eq->fid, 0));
	check("fi_ep_bind", fi_ep_bind(ep, &tx_cq->fid, FI_TRANSMIT | FI_SELECTIVE_COMPLETION));
	check("fi_ep_bind", fi_ep_bind(ep, &rx_cq->fid, FI_RECV));
	slots = length / size;
	if (posix_memalign((void **)&memory, 4096, length))
		fail("memory", FI_ENOMEM);
	memset(memory, 1, length);
	check("fi_mr_reg", fi_mr_reg(domain, memory, length, FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
	/* Depending on the provider's mode, remote addresses are virtual addresses or offsets. */
	target.address = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)memory : 0;
	target.key = fi_mr_key(mr);
	check("fi_enable", fi_enable(ep));
	drive_receives();
}

static void open_fabric(const char *address, const char *port, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_eq_attr attributes = {.wait_obj = FI_WAIT_UNSPEC};

	if (!hints)
		fail("fi_allocinfo", FI_ENOMEM);
	hints->fabric_attr->prov_name = strdup("tcp");
	hints->ep_attr->type = FI_EP_MSG;
	hints->caps = FI_MSG | FI_RMA;
	hints->addr_format = FI_SOCKADDR_IN;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	/* The provider makes progress only when it is polled, without threads and locks of its own. */
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	check("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), address, port, flags, hints, &info));
	fi_freeinfo(hints);
	/* The provider's limit may be lower; see FI_TCP_TX_SIZE and FI_TCP_RX_SIZE. */
	depth = depth < info->tx_attr->size ? depth : info->tx_attr->size;
	depth = depth < info->rx_attr->size ? depth : info->rx_attr->size;
	check("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	check("fi_eq_open", fi_eq_open(fabric, &attributes, &eq, NULL));
}

static void connect_or_accept(const char *port, const char *address)
{
	char room[sizeof(struct fi_eq_cm_entry) + sizeof(struct target)] = {0};
	struct fi_eq_cm_entry *entry = (struct fi_eq_cm_entry *)room;
	struct fid_pep *listener;

	open_fabric(address ? address : "127.0.0.1", port, address ? 0 : FI_SOURCE);
	if (address) {
		open_endpoint();
		check("fi_connect", fi_connect(ep, info->dest_addr, NULL, 0));
		await_event(FI_CONNECTED, entry, sizeof(room));
		memcpy(&target, entry->data, sizeof(target));
		return;
	}
	check("fi_passive_ep", fi_passive_ep(fabric, info, &listener, NULL));
	check("fi_pep_bind", fi_pep_bind(listener, &eq->fid, 0));
	check("fi_listen", fi_listen(listener));
	await_event(FI_CONNREQ, entry, sizeof(room));
	info = entry->info;
	open_endpoint();
	check("fi_accept", fi_accept(ep, &target, sizeof(target)));
	await_event(FI_CONNECTED, entry, sizeof(room));
}

int main(int argc, char **argv)
{
	uint64_t count, warm;
	double begin, seconds;

	if (argc < 6 || argc > 7 || (strcmp(argv[1], "rma") && strcmp(argv[1], "msg"))) {
		fprintf(stderr, "usage: fi_bw rma|msg OCTETS COUNT DEPTH PORT [ADDRESS]\n");
		return 2;
	}
	is_rma = !strcmp(argv[1], "rma");
	size = strtoull(argv[2], NULL, 10);
	count = strtoull(argv[3], NULL, 10);
	depth = strtoull(argv[4], NULL, 10);
	if (!size || !count || !depth)
		fail("OCTETS, COUNT and DEPTH must be numbers above 0", FI_EINVAL);
	signal(SIGALRM, timed_out);
	alarm(LIMIT);
	connect_or_accept(argv[5], argc == 7 ? argv[6] : NULL);
	warm = count / 20 + 1;
	(argc == 6 ? server : client)(warm);
	begin = now();
	(argc == 6 ? server : client)(count);
	seconds = now() - begin;
	if (argc == 6)
		return 0;
	printf("%zu %llu %llu %.6f %.6f\n", size, (unsigned long long)count, (unsigned long long)depth,
	       (double)(size * count) / seconds / 1e9, (double)count / seconds / 1e6);
	return 0;
}
