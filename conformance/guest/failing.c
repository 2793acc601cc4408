/* Creates objects of every kind while the kernel's first allocation fails, then the second, and so
 * on until the creation succeeds.
 *
 * failing ADDR PORT FILE
 *
 * FILE is a parameter of the module: the number of the allocation to fail. It counts down to 0.
 *
 * A failed creation must report an error, and a failed connection must end. Prints the number of
 * allocations for each kind. Exit status: 0 unless a call failed without a failed allocation, or
 * with another error than ENOMEM.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 2000

static struct sockaddr_in address;
static struct ibv_device *device;
static struct ibv_context *verbs;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static unsigned char memory[64 * 4096];
static int file;

static void must(int bad, const char *what)
{
	if (bad) {
		printf("failed: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static void arm(int n)
{
	char text[16];
	int len = snprintf(text, sizeof text, "%d", n);

	must(pwrite(file, text, (size_t)len, 0) != len, "arming");
}

/* Returns whether an allocation has failed. */
static int disarm(void)
{
	char text[16] = "";

	must(pread(file, text, sizeof text - 1, 0) <= 0, "reading what is left");
	arm(0);
	return atoi(text) == 0;
}

/* Each function creates an object and destroys it. Returns 0, or the error. */

static int a_context(void)
{
	struct ibv_context *made = ibv_open_device(device);

	if (!made)
		return errno;
	must(ibv_close_device(made), "closing");
	return 0;
}

static int a_domain(void)
{
	struct ibv_pd *made = ibv_alloc_pd(verbs);

	if (!made)
		return errno;
	must(ibv_dealloc_pd(made), "end of the domain");
	return 0;
}

static int a_completion_queue(void)
{
	struct ibv_cq *made = ibv_create_cq(verbs, 5000, NULL, NULL, 0);

	if (!made)
		return errno;
	must(ibv_destroy_cq(made), "end of the completion queue");
	return 0;
}

static struct ibv_qp_init_attr queues(void)
{
	return (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					  .cap = { 256, 256, 4, 4, 16 } };
}

static int a_queue_pair(void)
{
	struct ibv_qp_init_attr attr = queues();
	struct ibv_qp *made = ibv_create_qp(pd, &attr);

	if (!made)
		return errno;
	must(ibv_destroy_qp(made), "end of the queue pair");
	return 0;
}

static int a_region(void)
{
	struct ibv_mr *made = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE |
					 IBV_ACCESS_REMOTE_WRITE);

	if (!made)
		return errno;
	must(ibv_dereg_mr(made), "end of the region");
	return 0;
}

static int a_listener(void)
{
	struct sockaddr_in other = address;
	struct rdma_cm_id *made;
	int error = 0;

	if (rdma_create_id(channel, &made, NULL, RDMA_PS_TCP))
		return errno;
	other.sin_port = htons((uint16_t)(ntohs(address.sin_port) + 1));
	if (rdma_bind_addr(made, (struct sockaddr *)&other) || rdma_listen(made, 4))
		error = errno;
	rdma_destroy_id(made);
	return error;
}

/* Returns the next event's type, and its identifier in `id`. */
static enum rdma_cm_event_type event(struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	must(rdma_get_cm_event(channel, &event), "event");
	type = event->event;
	*id = event->id;
	must(rdma_ack_cm_event(event), "event");
	return type;
}

/* Accepts or rejects a connection. Returns the accepted identifier. */
static struct rdma_cm_id *accept_one(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	struct ibv_qp_init_attr attr = queues();

	if (rdma_create_qp(id, pd, &attr) || rdma_accept(id, param)) {
		if (id->qp)
			rdma_destroy_qp(id);
		rdma_reject(id, NULL, 0);
		rdma_destroy_id(id);
		return NULL;
	}
	return id;
}

/* Connects two queue pairs of this process. Allocations in the driver's work items also fail, so an
 * event reports the result. */
static int converse(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	struct rdma_cm_id *of, *peer = NULL;
	int established = 0, error = 0;

	if (rdma_connect(id, &param))
		return errno;
	while (!error && established < 2) {
		enum rdma_cm_event_type type = event(&of);
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			peer = accept_one(of, &param);
		else if (type == RDMA_CM_EVENT_ESTABLISHED)
			established++;
		else
			error = ENOMEM;
	}
	if (peer) {
		rdma_disconnect(peer);
		rdma_destroy_qp(peer);
		must(rdma_destroy_id(peer), "end of the peer");
	}
	return error;
}

static int a_connection(void)
{
	struct ibv_qp_init_attr attr = queues();
	struct rdma_cm_id *id, *of;
	int error = 0;

	if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
		return errno;
	if (rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 3000) ||
	    event(&of) != RDMA_CM_EVENT_ADDR_RESOLVED ||
	    rdma_resolve_route(id, 3000) || event(&of) != RDMA_CM_EVENT_ROUTE_RESOLVED ||
		    rdma_create_qp(id, pd, &attr))
		error = errno ? errno : ENOMEM;
	else
		error = converse(id);
	if (id->qp)
		rdma_destroy_qp(id);
	must(rdma_destroy_id(id), "end of the connection");
	return error;
}

static void walk(const char *name, int (*make)(void))
{
	int n, failed;

	for (n = 1; n < MOST; n++) {
		errno = 0;
		arm(n);
		int error = make();
		failed = disarm();
		if (!failed && error) {
			printf("failed: %s, although there was memory: %s\n", name,
			       strerror(error));
			exit(1);
		}
		if (!failed)
			break;
		if (error && error != ENOMEM) {
			printf("failed: %s, allocation %d: %s\n", name, n, strerror(error));
			exit(1);
		}
	}
	printf("%s: %d allocations\n", name, n - 1);
}

int main(int argc, char **argv)
{
	if (argc < 4 || !inet_aton(argv[1], &address.sin_addr))
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	address.sin_family = AF_INET;
	address.sin_port = htons((uint16_t)atoi(argv[2]));
	file = open(argv[3], O_RDWR);
	must(file < 0, argv[3]);
	must(!(channel = rdma_create_event_channel()), "event channel");
	must(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "id");
	must(rdma_bind_addr(listener, (struct sockaddr *)&address) || rdma_listen(listener, 8),
	     "listener");
	/* Queue pairs of a connection belong to the context that librdmacm has opened. */
	verbs = listener->verbs;
	device = verbs->device;
	must(!(pd = ibv_alloc_pd(verbs)), "domain");
	must(!(cq = ibv_create_cq(verbs, 64, NULL, NULL, 0)), "completion queue");
	walk("context", a_context);
	walk("protection domain", a_domain);
	walk("completion queue", a_completion_queue);
	walk("queue pair", a_queue_pair);
	walk("region", a_region);
	walk("listener", a_listener);
	walk("connection", a_connection);
	return 0;
}
