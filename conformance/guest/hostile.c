/* Writes invalid entries into the rings that it shares with the driver. The kernel and other
 * programs must be unaffected.
 *
 * hostile ADDR PORT ENTRIES [SEED]
 *
 * Two queue pairs of this process are connected to each other. The program writes entries into
 * their rings: most are valid, others have random fields, or are random entirely. It forges
 * completion flags, requests mappings without permission, and rings the doorbell, while a second
 * thread writes into the rings at any time. When a connection has ended, the program opens another,
 * until the driver has processed ENTRIES entries. Three kinds of memory must not change: memory and
 * queues of a second process, memory next to a registered region, and deregistered memory.
 *
 * The last line of the output is "hostile: N entries, ..., M connections". Exit status: 1 if
 * protected memory changed or a valid step failed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hostile.h"

#define SENDS 64u
#define RECEIVES 128u
#define COMPLETIONS 1024u
#define MAX_STEPS 64 /* per connection */

struct ring {
	char *at;
	size_t octets;
};

/* An end of a connection. */
struct end {
	struct rdma_cm_id *id;
	struct ring sends, receives;
};

static struct sockaddr_in address;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ring completions;
static struct end ends[2];
static unsigned long entries, connections, successes, wanted;
static int victim;
/* The rings exist while `connected` is set, which `lock` protects. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int connected;

static void fail_if(int bad, const char *what)
{
	if (bad) {
		printf("failed: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static unsigned char pattern(size_t i)
{
	return (unsigned char)(i * 7 + i / 253);
}

/* ---- protected memory ---- */

static void fill(void)
{
	for (size_t i = 0; i < ARENA * PAGE; i++)
		arena[i] = pattern(i);
}

static int may_change(size_t i)
{
	for (int r = 0; r < REGIONS; r++)
		if (regions[r].writable && i >=
			regions[r].offset && i < regions[r].offset + regions[r].len)
			return 1;
	return 0;
}

static void check_memory(void)
{
	char answer;

	for (size_t i = 0; i < ARENA * PAGE; i++)
		if (arena[i] != pattern(i) && !may_change(i)) {
			printf("failed: octet %zu of page %zu, which is protected, has changed\n",
				i % PAGE, i / PAGE);
			exit(1);
		}
	fail_if(write(victim, "?", 1) != 1 || read(victim, &answer, 1) != 1 || answer != '!',
		"memory of the second process has changed");
}

/* ---- rings ---- */

/* Finds the driver's mappings that did not exist at the last call. Returns their number, at most
 * `most`.
 */
static int new_rings(struct ring *found, int most)
{
	static unsigned long known[64];
	static int count;
	unsigned long seen[64];
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");
	int now = 0, fresh = 0;

	fail_if(!maps, "maps");
	while (fgets(line, sizeof line, maps)) {
		unsigned long from, to;
		int old = 0;
		if (!strstr(line, "uverbs") || sscanf(line, "%lx-%lx", &from, &to) != 2 ||
		    now == 64)
			continue;
		for (int i = 0; i < count; i++)
			old |= known[i] == from;
		if (!old && fresh < most)
			found[fresh++] = (struct ring){ (char *)from, to - from };
		seen[now++] = from;
	}
	fclose(maps);
	memcpy(known, seen, sizeof known);
	count = now;
	return fresh;
}

/* Writes an entry into each slot that the driver has consumed, and sets its valid flag. */
static void post(struct end *end)
{
	struct siw_sqe *send = (struct siw_sqe *)end->sends.at;
	struct siw_rqe *receive = (struct siw_rqe *)end->receives.at;

	for (unsigned i = 0; i < SENDS; i++)
		if (!(__atomic_load_n(&send[i].flags, __ATOMIC_ACQUIRE) & SIW_WQE_VALID)) {
			send_entry(&send[i]);
			__atomic_or_fetch(&send[i].flags, SIW_WQE_VALID, __ATOMIC_RELEASE);
			entries++;
		}
	for (unsigned i = 0; i < RECEIVES; i++)
		if (!(__atomic_load_n(&receive[i].flags, __ATOMIC_ACQUIRE) & SIW_WQE_VALID)) {
			receive_entry(&receive[i]);
			__atomic_or_fetch(&receive[i].flags, SIW_WQE_VALID, __ATOMIC_RELEASE);
			entries++;
		}
}

/* Polls completions, and sometimes overwrites the completion queue with random words. */
static void poll_and_forge(void)
{
	struct siw_cqe *entry = (struct siw_cqe *)completions.at;
	struct siw_cq_ctrl *control = (struct siw_cq_ctrl *)(entry + COMPLETIONS);

	for (unsigned i = 0; i < COMPLETIONS; i++)
		if (__atomic_load_n(&entry[i].flags, __ATOMIC_ACQUIRE) & SIW_WQE_VALID) {
			successes += entry[i].status == SIW_WC_SUCCESS;
			__atomic_store_n(&entry[i].flags, 0, __ATOMIC_RELEASE);
			entries++;
		}
	control->flags = random_below(4) ? random_below(8) : (uint32_t)random64();
	if (!random_below(4 * invalid_interval))
		random_words(entry, COMPLETIONS * sizeof *entry);
}

/* A thread: overwrites random words of the rings, even while the driver reads them. */
static void *overwrite_rings(void *seed)
{
	state = (uintptr_t)seed;
	for (;;) {
		const struct ring *ring[] = { &ends[0].sends, &ends[0].receives, &ends[1].sends,
					      &ends[1].receives, &completions };
		pthread_mutex_lock(&lock);
		const struct ring *target = ring[random_below(5)];
		for (int i = 0; connected && i < 4 && invalid_interval < 32; i++) {
			uint64_t *word =
				(uint64_t *)target->at +
				random_below((uint32_t)(target->octets / 8));
			uint64_t value = random_below(2) ? random64() : __atomic_load_n(word,
					__ATOMIC_RELAXED) ^ (1ull << random_below(64));
			__atomic_store_n(word, value, __ATOMIC_RELAXED);
		}
		pthread_mutex_unlock(&lock);
		usleep(random_below(2000));
	}
	return NULL;
}

/* ---- calls ---- */

static void doorbell(const struct end *end)
{
	struct ib_uverbs_post_send_resp answer;
	struct {
		struct ib_uverbs_cmd_hdr header;
		struct ib_uverbs_post_send call;
	} command = {
		{ IB_USER_VERBS_CMD_POST_SEND, sizeof command / 4, sizeof answer / 4 },
		{ (uintptr_t)&answer, end->id->qp->handle, 0, 0, sizeof(struct ib_uverbs_send_wr) },
	};

	fail_if(write(end->id->verbs->cmd_fd, &command, sizeof command) != sizeof command,
		"doorbell");
}

static void make_invalid_calls(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = random_below(8) };
	struct ibv_mr *mr;
	size_t len = PAGE << random_below(6);
	void *at;

	switch (random_below(6)) {
	case 0:
		at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, end->id->verbs->cmd_fd,
			  (off_t)(random_below(2) ? random_below(64) * PAGE :
				  (random64() & 0xfffffffffff) * PAGE));
		/* The offset may be that of a ring of this process, but of no other process. */
		if (at != MAP_FAILED)
			munmap(at, len);
		break;
	case 1:
		at = mremap(end->sends.at, end->sends.octets, 8 * end->sends.octets,
			    MREMAP_MAYMOVE);
		fail_if(at != MAP_FAILED, "a ring was enlarged");
		break;
	case 2:
		mr = ibv_reg_mr(pd, (void *)random64(),
			random_below(2) ? random64() : random_below(100000),
				IBV_ACCESS_LOCAL_WRITE);
		if (mr)
			ibv_dereg_mr(mr);
		break;
	case 3:
		mr = ibv_reg_mr(pd, arena, ARENA * PAGE, (int)random64() & ~(IBV_ACCESS_ON_DEMAND |
				IBV_ACCESS_LOCAL_WRITE));
		if (mr)
			ibv_dereg_mr(mr);
		break;
	case 4:
		ibv_modify_qp(end->id->qp, &attr, IBV_QP_STATE | (int)(random64() & 0x1fffff));
		break;
	default:
		attr.qp_state = IBV_QPS_ERR;
		ibv_modify_qp(end->id->qp, &attr, IBV_QP_STATE);
	}
}

/* ---- connections ---- */

static struct rdma_cm_event *next(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	fail_if(rdma_get_cm_event(channel, &event), "event");
	if (event->event != type) {
		printf("failed: %s (%d) instead of %s\n", rdma_event_str(event->event),
		       event->status, rdma_event_str(type));
		exit(1);
	}
	return event;
}

static void expect(enum rdma_cm_event_type type)
{
	rdma_ack_cm_event(next(type));
}

static void create_queue_pair(struct end *end)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { SENDS, RECEIVES, SIW_MAX_SGE, SIW_MAX_SGE, 64 } };
	struct ring found[2];

	fail_if(rdma_create_qp(end->id, pd, &attr), "queue pair");
	fail_if(new_rings(found, 2) != 2, "rings");
	/* Of the two rings the send queue is the smaller. */
	int larger = found[1].octets > found[0].octets;
	end->receives = found[larger];
	end->sends = found[!larger];
}

static void set_connected(int value)
{
	pthread_mutex_lock(&lock);
	connected = value;
	pthread_mutex_unlock(&lock);
}

static void connect_ends(void)
{
	struct rdma_conn_param param = { .responder_resources = 16, .initiator_depth = 16 };
	struct rdma_cm_event *event;

	/* Each connection has its own completion queue, because an overflow makes it unusable. */
	fail_if(!(cq = ibv_create_cq(listener->verbs, COMPLETIONS, NULL, NULL, 0)),
		"completion queue");
	fail_if(new_rings(&completions, 1) != 1, "ring");
	fail_if(rdma_create_id(channel, &ends[0].id, NULL, RDMA_PS_TCP), "id");
	fail_if(rdma_resolve_addr(ends[0].id, NULL, (struct sockaddr *)&address, 3000), "resolve");
	expect(RDMA_CM_EVENT_ADDR_RESOLVED);
	fail_if(rdma_resolve_route(ends[0].id, 3000), "route");
	expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_queue_pair(&ends[0]);
	fail_if(rdma_connect(ends[0].id, &param), "connect");
	event = next(RDMA_CM_EVENT_CONNECT_REQUEST);
	ends[1].id = event->id;
	create_queue_pair(&ends[1]);
	fail_if(rdma_accept(ends[1].id, &param), "accept");
	rdma_ack_cm_event(event);
	expect(RDMA_CM_EVENT_ESTABLISHED);
	expect(RDMA_CM_EVENT_ESTABLISHED);
	set_connected(1);
	connections++;
}

static void disconnect_ends(void)
{
	set_connected(0);
	for (int i = 0; i < 2; i++) {
		if (random_below(2))
			rdma_disconnect(ends[i].id);
		rdma_destroy_qp(ends[i].id);
		fail_if(rdma_destroy_id(ends[i].id), "destroying an identifier");
	}
	fail_if(ibv_destroy_cq(cq), "destroying the completion queue");
	new_rings(NULL, 0);
}

static void register_region(struct region *region)
{
	region->mr = ibv_reg_mr(pd, arena + region->offset, region->len, region->access);
	fail_if(!region->mr, "region");
}

/* Deregisters a region, and records that its memory must no longer change. Unless `last` is set,
 * the driver may refuse because a connection uses the region.
 */
static void deregister_region(struct region *region, int last)
{
	int error = ibv_dereg_mr(region->mr);

	if (error == EBUSY && !last)
		return;
	fail_if(error, "deregistration");
	region->mr = NULL;
	region->writable = 0;
	for (size_t i = region->offset; i < region->offset + region->len; i++)
		arena[i] = pattern(i);
}

static int in_error(const struct end *end)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	fail_if(ibv_query_qp(end->id->qp, &attr, IBV_QP_STATE, &init), "state");
	return attr.qp_state == IBV_QPS_ERR;
}

static void run_connection(void)
{
	int steps = 1 + (int)random_below(MAX_STEPS), revoke_step = (int)random_below(8), failed =
		0;

	invalid_interval = 4u << random_below(8);
	register_region(&regions[REVOKED]);
	regions[REVOKED].writable = 1;
	connect_ends();
	for (int step = 0; step < steps; step++) {
		struct end *end = &ends[random_below(2)];
		post(&ends[0]);
		post(&ends[1]);
		doorbell(end);
		poll_and_forge();
		if (!random_below(invalid_interval))
			make_invalid_calls(end);
		if (step == revoke_step)
			deregister_region(&regions[REVOKED], 0);
		/* A queue pair in the error state only flushes, which tests nothing new after a few
		 * steps. Some steps follow, because a new connection takes as long as a thousand
		 * entries. */
		if (!failed && in_error(end)) {
			failed = 1;
			steps = step + (int)random_below(16);
		}
	}
	disconnect_ends();
	if (regions[REVOKED].mr)
		deregister_region(&regions[REVOKED], 1);
	check_memory();
}

/* ---- the second process, and main ---- */

static void run_victim(struct ibv_context *verbs, int socket)
{
	struct ibv_pd *own = ibv_alloc_pd(verbs);
	struct ibv_cq *queue = ibv_create_cq(verbs, 64, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = { .send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC,
					 .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_mr *mr = ibv_reg_mr(own, arena, ARENA * PAGE, IBV_ACCESS_LOCAL_WRITE |
				       IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	struct ring found[3];
	char command;

	fail_if(!mr || !ibv_create_qp(own, &attr) || new_rings(found, 3) != 3,
		"the second process");
	fail_if(write(socket, &mr->rkey, 4) != 4, "pipe");
	while (read(socket, &command, 1) == 1) {
		size_t changed = 0;
		for (size_t i = 0; i < ARENA * PAGE; i++)
			changed += arena[i] != pattern(i);
		/* These queues are not in use, so the driver does not write to them. The provider
		 * initializes the control word of the completion queue to zero. */
		for (int r = 0; r < 3; r++)
			for (size_t i = 0; i < found[r].octets; i++)
				changed += found[r].at[i] != 0;
		fail_if(write(socket, changed ? "X" : "!", 1) != 1, "answer");
	}
	_exit(0);
}

/* Opens the device that has the address, in the calling process. */
static struct ibv_context *open_device(void)
{
	struct sockaddr_in at = address;
	struct rdma_cm_id *id;

	at.sin_port = 0;
	fail_if(!(channel = rdma_create_event_channel()), "event channel");
	fail_if(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "id");
	fail_if(rdma_bind_addr(id, (struct sockaddr *)&at), "bind");
	return id->verbs;
}

static void start_victim(void)
{
	int pair[2];

	fail_if(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socket pair");
	if (!fork()) {
		close(pair[0]);
		run_victim(open_device(), pair[1]);
	}
	close(pair[1]);
	victim = pair[0];
	victim_address = (uintptr_t)arena;
	fail_if(read(victim, &victim_stag, 4) != 4, "the second process");
}

int main(int argc, char **argv)
{
	pthread_t thread;
	uint64_t seed = argc > 4 ? strtoull(argv[4], NULL, 0) : 1;

	if (argc < 4 || !inet_aton(argv[1], &address.sin_addr))
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	address.sin_family = AF_INET;
	address.sin_port = htons((uint16_t)atoi(argv[2]));
	wanted = strtoul(argv[3], NULL, 0);
	state = seed * 0x9e3779b97f4a7c15 + 1;
	arena = mmap(NULL, ARENA * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		     0);
	fail_if(arena == MAP_FAILED, "memory");
	fill();
	start_victim();
	fail_if(!(channel = rdma_create_event_channel()), "event channel");
	fail_if(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "id");
	fail_if(rdma_bind_addr(listener, (struct sockaddr *)&address), "bind");
	fail_if(rdma_listen(listener, 8), "listen");
	fail_if(!(pd = ibv_alloc_pd(listener->verbs)), "protection domain");
	register_region(&regions[OPEN]);
	register_region(&regions[NO_ACCESS]);
	fail_if(pthread_create(&thread, NULL, overwrite_rings, (void *)(uintptr_t)(seed + 1000)),
		"thread");
	while (entries < wanted)
		run_connection();
	printf("hostile: %lu entries, %lu completed successfully, %lu connections\n", entries,
		successes,
	       connections);
	return 0;
}
