/* Creates objects of every kind. For each kind, the module's first memory allocation fails at the
 * first attempt, the second at the second attempt, and so on until the creation succeeds.
 *
 * failing ADDR PORT FILE
 *
 * FILE is the module parameter that selects the allocation to fail. The module counts it down to 0.
 *
 * A failed creation must report an error, and a failed connection must end. The output is the
 * number of allocations for each kind. Exit status: 1 if a call failed although no allocation
 * failed, or with another error than ENOMEM.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_ALLOCATIONS 2000

static struct sockaddr_in address;
static struct ibv_device *device;
static struct ibv_context *verbs;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static unsigned char memory[64 * 4096];
static int file;

static void fail_if(int bad, const char *what)
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

	fail_if(pwrite(file, text, (size_t)len, 0) != len, "writing the module parameter");
}

/* Returns whether an allocation has failed. */
static int disarm(void)
{
	char text[16] = "";

	fail_if(pread(file, text, sizeof text - 1, 0) <= 0, "reading the module parameter");
	arm(0);
	return atoi(text) == 0;
}

/* Each of these functions creates an object and destroys it. They return 0 or an errno value. */

static int try_context(void)
{
	struct ibv_context *object = ibv_open_device(device);

	if (!object)
		return errno;
	fail_if(ibv_close_device(object), "closing");
	return 0;
}

static int try_domain(void)
{
	struct ibv_pd *object = ibv_alloc_pd(verbs);

	if (!object)
		return errno;
	fail_if(ibv_dealloc_pd(object), "destroying the domain");
	return 0;
}

static int try_completion_queue(void)
{
	struct ibv_cq *object = ibv_create_cq(verbs, 5000, NULL, NULL, 0);

	if (!object)
		return errno;
	fail_if(ibv_destroy_cq(object), "destroying the completion queue");
	return 0;
}

static struct ibv_qp_init_attr qp_attributes(void)
{
	return (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					  .cap = { 256, 256, 4, 4, 16 } };
}

static int try_queue_pair(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *object = ibv_create_qp(pd, &attr);

	if (!object)
		return errno;
	fail_if(ibv_destroy_qp(object), "destroying the queue pair");
	return 0;
}

static int try_region(void)
{
	struct ibv_mr *object = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE |
					 IBV_ACCESS_REMOTE_WRITE);

	if (!object)
		return errno;
	fail_if(ibv_dereg_mr(object), "destroying the region");
	return 0;
}

static int try_listener(void)
{
	struct sockaddr_in other = address;
	struct rdma_cm_id *object;
	int error = 0;

	if (rdma_create_id(channel, &object, NULL, RDMA_PS_TCP))
		return errno;
	other.sin_port = htons((uint16_t)(ntohs(address.sin_port) + 1));
	if (rdma_bind_addr(object, (struct sockaddr *)&other) || rdma_listen(object, 4))
		error = errno;
	rdma_destroy_id(object);
	return error;
}

/* Returns the next event's type, and its identifier in `id`. */
static enum rdma_cm_event_type event(struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	fail_if(rdma_get_cm_event(channel, &event), "event");
	type = event->event;
	*id = event->id;
	fail_if(rdma_ack_cm_event(event), "event");
	return type;
}

/* Accepts a connection, or rejects it and returns NULL if that fails. */
static struct rdma_cm_id *accept_request(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	struct ibv_qp_init_attr attr = qp_attributes();

	if (rdma_create_qp(id, pd, &attr) || rdma_accept(id, param)) {
		if (id->qp)
			rdma_destroy_qp(id);
		rdma_reject(id, NULL, 0);
		rdma_destroy_id(id);
		return NULL;
	}
	return id;
}

/* Connects two queue pairs of this process. An allocation may also fail in one of the driver's work
 * items; an event then reports the failure. */
static int connect_and_disconnect(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	struct rdma_cm_id *event_id, *peer = NULL;
	int established = 0, error = 0;

	if (rdma_connect(id, &param))
		return errno;
	while (!error && established < 2) {
		enum rdma_cm_event_type type = event(&event_id);
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			peer = accept_request(event_id, &param);
		else if (type == RDMA_CM_EVENT_ESTABLISHED)
			established++;
		else
			error = ENOMEM;
	}
	if (peer) {
		rdma_disconnect(peer);
		rdma_destroy_qp(peer);
		fail_if(rdma_destroy_id(peer), "destroying the peer");
	}
	return error;
}

static int try_connection(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct rdma_cm_id *id, *event_id;
	int error = 0;

	if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
		return errno;
	if (rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 3000) ||
	    event(&event_id) != RDMA_CM_EVENT_ADDR_RESOLVED ||
	    rdma_resolve_route(id, 3000) || event(&event_id) != RDMA_CM_EVENT_ROUTE_RESOLVED ||
		    rdma_create_qp(id, pd, &attr))
		error = errno ? errno : ENOMEM;
	else
		error = connect_and_disconnect(id);
	if (id->qp)
		rdma_destroy_qp(id);
	fail_if(rdma_destroy_id(id), "destroying the connection");
	return error;
}

static void fail_each_allocation(const char *name, int (*make)(void))
{
	int n, failed;

	for (n = 1; n < MAX_ALLOCATIONS; n++) {
		errno = 0;
		arm(n);
		int error = make();
		failed = disarm();
		if (!failed && error) {
			printf("failed: %s, although no allocation failed: %s\n", name,
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
	fail_if(file < 0, argv[3]);
	fail_if(!(channel = rdma_create_event_channel()), "event channel");
	fail_if(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "id");
	fail_if(rdma_bind_addr(listener, (struct sockaddr *)&address) || rdma_listen(listener, 8),
		"listener");
	/* Queue pairs of a connection belong to the context that librdmacm has opened. */
	verbs = listener->verbs;
	device = verbs->device;
	fail_if(!(pd = ibv_alloc_pd(verbs)), "domain");
	fail_if(!(cq = ibv_create_cq(verbs, 64, NULL, NULL, 0)), "completion queue");
	fail_each_allocation("context", try_context);
	fail_each_allocation("protection domain", try_domain);
	fail_each_allocation("completion queue", try_completion_queue);
	fail_each_allocation("queue pair", try_queue_pair);
	fail_each_allocation("region", try_region);
	fail_each_allocation("listener", try_listener);
	fail_each_allocation("connection", try_connection);
	return 0;
}
