/* Lesson 4: the client sends a message, and the server answers.
 *
 * usage: message            waits for one client on port 7471
 *        message HOST       sends a message to the server on HOST */
#include "lesson.h"
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PORT "7471"
#define SIZE 256

static char in[SIZE], out[SIZE];

/* Creates an identifier with a queue pair (`host` is the server's), or a listener. */
static struct rdma_cm_id *endpoint(const char *host)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP,
				      .ai_flags = host ? 0 : RAI_PASSIVE}, *address;
	struct ibv_qp_init_attr queues = {
		.sq_sig_all = 1,
		.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct rdma_cm_id *id;

	check(rdma_getaddrinfo(host, PORT, &hints, &address), "rdma_getaddrinfo");
	check(rdma_create_ep(&id, address, NULL, &queues), "rdma_create_ep");
	rdma_freeaddrinfo(address);
	return id;
}

static void say(struct rdma_cm_id *id, struct ibv_mr *mr)
{
	struct ibv_wc wc;

	check(rdma_post_send(id, NULL, out, strlen(out), mr, 0), "rdma_post_send");
	succeeded(rdma_get_send_comp(id, &wc), &wc);
	printf("sent      %s\n", out);
}

static void hear(struct rdma_cm_id *id)
{
	struct ibv_wc wc;

	succeeded(rdma_get_recv_comp(id, &wc), &wc);
	printf("received  %.*s\n", (int)wc.byte_len, in);
}

int main(int argc, char **argv)
{
	const char *host = argc > 1 ? argv[1] : NULL;
	struct rdma_cm_id *listener = NULL, *id = endpoint(host);
	struct rdma_conn_param param = {0};
	struct ibv_mr *send_mr, *recv_mr;

	if (!host) {
		listener = id;
		check(rdma_listen(listener, 1), "rdma_listen");
		printf("waiting on port " PORT "\n");
		check(rdma_get_request(listener, &id), "rdma_get_request");
	}
	send_mr = created(rdma_reg_msgs(id, out, SIZE), "rdma_reg_msgs");
	recv_mr = created(rdma_reg_msgs(id, in, SIZE), "rdma_reg_msgs");
	/* Before the connection exists, so that no message can come too early. */
	check(rdma_post_recv(id, NULL, in, SIZE, recv_mr), "rdma_post_recv");

	if (host) {
		check(rdma_connect(id, &param), "rdma_connect");
		strcpy(out, "hello over RDMA");
		say(id, send_mr);
		hear(id);
		rdma_disconnect(id);
	} else {
		check(rdma_accept(id, &param), "rdma_accept");
		hear(id);
		snprintf(out, SIZE, "you said '%.200s'", in);
		say(id, send_mr);
	}
	rdma_dereg_mr(send_mr);
	rdma_dereg_mr(recv_mr);
	rdma_destroy_ep(id);
	if (listener)
		rdma_destroy_ep(listener);
	return 0;
}
